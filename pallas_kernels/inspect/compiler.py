"""From Triton IR to machine code, by Triton's own compiler and the tools that come with it.

    pip install 'convjax[inspect]'

XLA compiles the kernel by the same passes when it loads it, from its own copy of Triton and with
its own ptxas: registers may differ by a few from those seen here. `triton.compile` given a file of
Triton IR would leave out the first stage (inliner, triton-combine, loop unrolling), which XLA has:
so all stages are run here, in order, and nothing is cached.
"""

import contextlib
import io
import re
import subprocess
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pallas_kernels.inspect.architectures import Architecture


class CompilerError(RuntimeError):
    """Triton or ptxas refused a kernel."""


@dataclass(frozen=True)
class Binary:
    """A kernel compiled for one architecture."""

    ptx: str
    sass: str
    """Empty where it was not asked for."""
    warps: int
    """Of a block."""
    registers: int
    """Of a thread."""
    spill_bytes: int
    """Of a thread: registers stored to local memory, which is global memory, and loaded from it, in
    bytes of instructions."""
    shared_bytes: int
    """Of a block."""
    tensor_columns: int
    """Of a block, in Blackwell's tensor memory."""


def missing() -> str | None:
    """What to install to compile kernels; None if it is there."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return "machine code needs Triton's compiler: pip install 'convjax[inspect]'"
    return None


def compile_kernel(
    ttir: str, *, warps: int, stages: int, architecture: Architecture, disassembled: bool = True
) -> Binary:
    """The machine code of a kernel.

    Args:
      ttir: the kernel, as Triton IR.
      warps: of a block.
      stages: of its pipeline.
      architecture: the GPU's.
      disassembled: whether `sass` is wanted, which takes as long as the compiler.

    Raises:
      CompilerError: the compiler refused it.
    """
    from triton.runtime.errors import PTXASError

    log = io.StringIO()
    try:
        with contextlib.redirect_stdout(log):
            asm, metadata = _run_stages(ttir, warps, stages, architecture.capability)
    except (RuntimeError, PTXASError) as error:
        message = textwrap.shorten(str(error), 300, placeholder=" …")
        raise CompilerError(f"no machine code for {architecture.name}: {message}") from error
    return Binary(
        ptx=asm["ptx"],
        sass=_disassemble(asm["cubin"]) if disassembled else "",
        warps=metadata["num_warps"],
        shared_bytes=metadata["shared"],
        tensor_columns=metadata["tmem_size"],
        **_resources(log.getvalue()),
    )


def _run_stages(
    ttir: str, warps: int, stages: int, capability: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    from triton import knobs
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget, Language
    from triton.compiler.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", capability, 32))
    # a·b + c in one instruction: XLA's choice, and said here because Triton's default will change.
    options = backend.parse_options(
        {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    )
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ttir")
        path.write_text(ttir)
        module = ir.parse_mlir_module(str(path), context)
    module.context = context
    makers: dict[str, Any] = {}
    backend.add_stages(makers, options, Language.TRITON)
    asm: dict[str, Any] = {}
    metadata = dict(vars(options))
    with knobs.nvidia.scope():
        knobs.nvidia.dump_ptxas_log = True  # printed on stdout
        for name, make in makers.items():
            module = asm[name] = make(module, metadata)
    return asm, metadata


def _disassemble(cubin: bytes) -> str:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        # Code only, without the data flow, which takes most of the time.
        command = [knobs.nvidia.nvdisasm.path, "-c", "-ndf", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _resources(log: str) -> dict[str, int]:
    """What ptxas says that a kernel uses, with the functions that it calls."""

    def total(pattern: str) -> int:
        return sum(int(number) for number in re.findall(pattern, log))

    stack = total(r"(\d+) bytes stack frame")
    spilled = total(r"(\d+) bytes spill stores") + total(r"(\d+) bytes spill loads")
    return {
        "registers": max(int(number) for number in re.findall(r"Used (\d+) registers", log)),
        # A stack without spills is an array that registers cannot index: as slow.
        "spill_bytes": spilled or stack,
    }
