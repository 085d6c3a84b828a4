"""The floor of a kernel's time on a named GPU: its FLOPs and its bytes at the datasheet's rates.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore
architectures", CACM 52(4), 2009.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from pallas_kernels.launch import Product

Bound = Literal["compute", "memory"]

Rate = Product | Literal["fp8"]
"""What a rate is of: a product of the kernels, or one of 8-bit floats."""


@dataclass(frozen=True)
class GPU:
    """A GPU of NVIDIA's, from its datasheet: dense rates, at boost clocks."""

    name: str
    architecture: str
    device_kind: str
    """As its driver and jax name it."""
    multiprocessors: int
    teraflops: dict[Rate, float]
    """TFLOP/s of products of 16-bit operands, of float32 operands in each way, and of 8-bit floats;
    where it has none, as 16-bit ones."""
    terabytes: float
    """TB/s of its memory."""


def _teraflops(operands: float, tf32: float, ieee: float, fp8: float) -> dict[Rate, float]:
    return {"operands": operands, "tf32": tf32, "tf32x3": tf32 / 3, "ieee": ieee, "fp8": fp8}


# NVIDIA's datasheets: A100 80GB SXM, H100 SXM, H200 SXM, HGX B200 (an eighth of the board; half of
# the rates given with sparsity); for the RTX 4090, "NVIDIA Ada GPU architecture", appendix A, with
# float32 accumulators.
_AMPERE = _teraflops(312.0, 156.0, 19.5, 312.0)
_ADA = _teraflops(165.2, 82.6, 82.6, 330.3)
_HOPPER = _teraflops(989.4, 494.7, 66.9, 1978.9)
_BLACKWELL = _teraflops(2250.0, 1125.0, 75.0, 4500.0)

_ALL = (
    GPU("A100", "sm_80", "NVIDIA A100-SXM4-80GB", 108, _AMPERE, 2.039),
    GPU("RTX4090", "sm_89", "NVIDIA GeForce RTX 4090", 128, _ADA, 1.008),
    GPU("H200", "sm_90", "NVIDIA H200", 132, _HOPPER, 4.8),
    GPU("H100", "sm_90", "NVIDIA H100 80GB HBM3", 132, _HOPPER, 3.35),
    GPU("B200", "sm_100", "NVIDIA B200", 148, _BLACKWELL, 8.0),
)

GPUS = {gpu.name: gpu for gpu in _ALL}


def default_gpu(architecture: str) -> GPU:
    """The GPU that an architecture's kernels are measured against."""
    return next(gpu for gpu in _ALL if gpu.architecture == architecture)


class Floor(NamedTuple):
    """The least time that a GPU can take."""

    seconds: float
    bound: Bound
    """Which of the two takes it: arithmetic, or memory."""
    intensity: float
    """The kernel's FLOPs for each byte."""
    ridge: float
    """FLOPs for each byte from which on arithmetic is the bound."""


def floor(gpu: GPU, product: Rate, *, flops: int, bytes_moved: int) -> Floor:
    """The floor of a kernel that makes `flops` by `product` and moves `bytes_moved`."""
    compute = flops / (gpu.teraflops[product] * 1e12)
    memory = bytes_moved / (gpu.terabytes * 1e12)
    return Floor(
        seconds=max(compute, memory),
        bound="compute" if compute >= memory else "memory",
        intensity=flops / bytes_moved,
        ridge=gpu.teraflops[product] / gpu.terabytes,
    )
