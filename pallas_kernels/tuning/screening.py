"""What the compiler says against a kernel, before it is built, checked and timed on the GPU.

A kernel that the compiler refuses, or a block that no multiprocessor has room for, cannot run. One
whose registers spill to memory can, and is slow: its candidate is dropped too. Only the compiler is
asked, the inspector's, for the architecture of the GPU; there need be none.
"""

from typing import NamedTuple

import jax

from pallas_kernels.blocks import Blocks
from pallas_kernels.calls import Call, Pass
from pallas_kernels.inspect import compiler
from pallas_kernels.inspect.architectures import ARCHITECTURES, Architecture, occupancy
from pallas_kernels.inspect.lowering import Launch, lower_choice
from pallas_kernels.inspect.query import NO_KERNEL
from pallas_kernels.inspect.roofline import default_gpu
from pallas_kernels.selection import Choice


class Objection(NamedTuple):
    """Why a kernel is not worth its time on the GPU."""

    kind: str
    """"spills", "no machine code", or what there is too little of, such as "shared memory"."""
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


class UnknownError(RuntimeError):
    """What kernels would be compiled to, or by what, is not known."""


def architecture_of(device_kind: str) -> Architecture:
    """The architecture of a GPU of this machine, by its name as the driver has it.

    Raises:
      UnknownError: Triton is not installed, the GPU is not there, or it is of an architecture that
        the inspector does not know.
    """
    if message := compiler.missing():
        raise UnknownError(message)
    try:
        devices = jax.devices("gpu")
    except RuntimeError:  # as jax says that there are none
        devices = []
    for device in devices:
        if device.device_kind == device_kind:
            name = f"sm_{str(device.compute_capability).replace('.', '')}"
            if name not in ARCHITECTURES:
                known = ", ".join(ARCHITECTURES)
                raise UnknownError(f"{device_kind} is {name}; the inspector knows {known}")
            return ARCHITECTURES[name]
    raise UnknownError(f"{device_kind} is not here, so its architecture is not known")


def objection(
    call: Call, which: Pass, choice: Choice, architecture: Architecture
) -> Objection | None:
    """What speaks against a kernel for a pass of `call`; None where it may be timed.

    A pure function: it traces and compiles, for any GPU of the architecture, and runs nothing.
    """
    try:
        trace = lower_choice(call, which, choice, default_gpu(architecture.name))
    except (ValueError, TypeError, NotImplementedError) as error:
        return Objection("no machine code", _first_line(error))
    if not trace.launches:
        return Objection("no machine code", NO_KERNEL)
    # What passes that go together launch beside the kernel that has the blocks is the same for all.
    of_choice = [each for each in trace.launches if choice.blocks in (None, Blocks(**each.blocks))]
    launches = of_choice or trace.launches
    # Of a convolution in groups each is a product, by the same kernel.
    for launch in {(each.ttir, each.warps, each.stages): each for each in launches}.values():
        if found := _against(launch, architecture):
            return found
    return None


def _against(launch: Launch, architecture: Architecture) -> Objection | None:
    try:
        binary = compiler.compile_kernel(
            launch.ttir,
            warps=launch.warps,
            stages=launch.stages,
            architecture=architecture,
            disassembled=False,
        )
    except compiler.CompilerError as error:
        return Objection("no machine code", _first_line(error))
    fit = occupancy(
        architecture,
        warps=binary.warps,
        registers=binary.registers,
        shared_bytes=binary.shared_bytes,
        tensor_columns=binary.tensor_columns,
    )
    if not fit.blocks:
        needs = {
            "shared memory": f"{binary.shared_bytes:,} bytes a block",
            "tensor memory": f"{binary.tensor_columns} columns a block",
        }
        detail = needs.get(fit.limit, "of a multiprocessor")
        return Objection(fit.limit, f"{detail} are more than {architecture.name} has")
    if binary.spill_bytes:
        return Objection("spills", f"{binary.spill_bytes:,} bytes a thread")
    return None


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
