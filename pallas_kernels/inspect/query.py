"""One question to the inspector, and its answers: a kernel each."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallas_kernels.blocks import Blocks
from pallas_kernels.calls import Call, MatmulFp8, Pass, Work
from pallas_kernels.inspect import machine_code
from pallas_kernels.inspect.architectures import ARCHITECTURES, Architecture
from pallas_kernels.inspect.compiler import Binary, compile_kernel
from pallas_kernels.inspect.lowering import Launch, Trace, lower
from pallas_kernels.inspect.machine_code import MachineCode
from pallas_kernels.inspect.roofline import GPU, Floor, Rate, floor
from pallas_kernels.launch import product
from pallas_kernels.workloads import Workload

NO_KERNEL = "XLA computes it, without a kernel"


@dataclass(frozen=True)
class Query:
    """One pass of one call, on one GPU."""

    call: Call
    gpu: GPU
    which: Pass = "forward"
    precision: str | None = None
    algorithm: str | None = None
    """Of a convolution; by default the backend's choice."""
    blocks: Blocks | None = None
    workload: Workload | None = None
    """The layer that makes the call, if it is one's."""

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.gpu.architecture]

    @property
    def product(self) -> Rate:
        """The arithmetic of its floor: float32 on the CUDA cores, unless it is products."""
        if isinstance(self.call, MatmulFp8):
            return "fp8"
        if not self.call.is_product:
            return "ieee"
        return product(jnp.dtype(self.call.dtype), self.precision)

    def trace(self) -> Trace:
        """The pass as jax hands it to XLA; errors as in `lower`."""
        options: dict[str, Any] = {}
        for name in ("precision", "algorithm", "blocks"):  # not every operation has all of them
            if getattr(self, name) is not None:
                options[name] = getattr(self, name)
        return lower(self.call, self.which, self.gpu, **options)

    def compile(self, launch: Launch) -> Binary:
        """One of its kernels, for the GPU's architecture; errors as in `compile_kernel`."""
        return compile_kernel(
            launch.ttir, warps=launch.warps, stages=launch.stages, architecture=self.architecture
        )


@dataclass(frozen=True)
class Answer:
    """A kernel of a query's pass; or, without launch or code, the reason that there is none."""

    query: Query
    launch: Launch | None = None
    code: MachineCode | None = None
    reason: str | None = None

    @property
    def _work(self) -> Work:
        return self.query.call.work(self.query.which)

    @property
    def flops(self) -> int:
        """The kernel's, or those of the call that has none."""
        return self._work.flops if self.launch is None else self.launch.flops

    @property
    def bytes_moved(self) -> int:
        """The kernel's at best, or those of the call that has none."""
        return self._work.bytes_moved if self.launch is None else self.launch.bytes_moved

    @property
    def floor(self) -> Floor:
        query = self.query
        return floor(query.gpu, query.product, flops=self.flops, bytes_moved=self.bytes_moved)


def inspect(query: Query) -> list[Answer]:
    """All kernels that a query's pass launches, in order; or one answer that says there are none.

    Raises:
      ValueError, TypeError, NotImplementedError: the operation refuses the call.
      CompilerError: the compiler refuses a kernel.
    """
    answers = []
    for launch in query.trace().launches:
        code = machine_code.read(query.compile(launch), query.architecture)
        answers.append(Answer(query, launch, code))
    return answers or [Answer(query, reason=NO_KERNEL)]
