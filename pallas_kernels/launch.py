"""Backends, lowerings and versions of jax: the only module that knows them.

An operation asks two questions here. `resolve`: which backend runs this call? `platform`: which
hardware is this trace for? Both are answered when the operation is called, never at import.

A kernel is written with four words from here, `load`, `store`, `dot` and `call`, and with jax. They
mean one thing on every lowering:

  triton     Pallas through Triton to PTX, on NVIDIA GPUs from Ampere on.
  interpret  the same kernel, run by Pallas's interpreter as XLA operations on any hardware.

A Mosaic GPU lowering joins here: `call` chooses the compiler's parameters, `dot` the matrix
instruction. `dot` is a primitive of our own, because `pallas.triton.dot` has no accumulator: left
to itself Pallas writes accumulator + dot(a, b, 0), and only a pass of XLA's pipeline
(triton-combine) makes one instruction of that. Here it is one from the start, for any pipeline.
"""

import contextlib
import functools
import json
import os
import platform as machine
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, cast, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lax.lax import canonicalize_precision
from jax._src.pallas.triton import lowering as triton_lowering
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pallas_triton
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.typing import DTypeLike
from jaxlib.triton import dialect as triton_dialect
from jaxtyping import Array, Bool, Float

from pallas_kernels.blocks import Blocks

Backend = Literal["auto", "xla", "triton", "interpret"]

Product = Literal["operands", "tf32", "tf32x3", "ieee"]
"""How a product is made of float32 operands: in tf32 (10 bits of mantissa), in three tf32 products
that carry 21 bits, or in float32 on the CUDA cores. 16-bit operands are multiplied as they are, and
so are 8-bit ones, which may be of two types."""

EIGHT_BITS = (jnp.float8_e4m3fn, jnp.float8_e5m2)
"""The 8-bit floats that Tensor Cores multiply, from sm_89 on."""

PARTIAL_SUM = 128
"""Hopper's Tensor Cores add products of 8-bit floats in about 14 bits, so after this many their sum
goes to a float32 accumulator. DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv:2412.19437,
section 3.3.2, takes it for the least that costs little time."""


COUNTABLE = 2**31
"""Kernels count the elements of an array in 32 bits, so it must have fewer than this."""


def resolve(
    operation: str, backend: str, *, available: Sequence[Backend], blocks: Any = None
) -> Backend:
    """The backend, one of `available`, that runs `operation`.

    "auto" is the first of `available`; any other name is taken at its word.

    Raises:
      ValueError: `backend` is no backend's name, or `blocks` are given to XLA, which has none.
      TypeError: `blocks` are no `Blocks`.
      NotImplementedError: `operation` has no such backend.
    """
    names = get_args(Backend)
    if backend not in names:
        raise ValueError(f"backend={backend!r} must be one of {', '.join(map(repr, names))}")
    chosen = available[0] if backend == "auto" else cast(Backend, backend)
    if chosen not in available:
        there = ", ".join(map(repr, available))
        raise NotImplementedError(f"{operation} has no backend {chosen!r}; it has {there}")
    if chosen == "xla" and blocks is not None:
        raise ValueError(f"blocks={blocks!r} must be None with backend='xla': XLA has no blocks")
    if not isinstance(blocks, Blocks | None):
        raise TypeError(f"blocks={blocks!r} must be pallas_kernels.Blocks, or None")
    return chosen


def ranked(kernel_first: bool) -> tuple[Backend, ...]:
    """All backends, the one that "auto" means first."""
    return ("triton", "xla", "interpret") if kernel_first else ("xla", "triton", "interpret")


def is_countable(*arrays: Array | jax.ShapeDtypeStruct) -> bool:
    """Whether kernels can count the elements of every array, whose sizes must be known."""
    known = all(isinstance(size, int) for array in arrays for size in array.shape)
    return known and all(array.size < COUNTABLE for array in arrays)


def platform() -> str:
    """The hardware of this trace, "cpu", "gpu" (NVIDIA's), "rocm" (AMD's) or "tpu": of the mesh in
    use, else the default."""
    device = _device()
    if device is None:
        name = jax.default_backend()
    else:
        name = device if isinstance(device, str) else device.platform
    if name == "gpu" and device is None:
        version = jax.devices()[0].client.platform_version
        return "rocm" if "rocm" in version.lower() else "gpu"
    return "gpu" if name == "cuda" else name


def device_kind() -> str:
    """The device of this trace as its driver names it, "NVIDIA H200"; a CPU by its maker's name."""
    device = _device()
    if device is None or isinstance(device, str):
        device = jax.devices(device)[0]
    return _processor() if device.device_kind == "cpu" else device.device_kind


def _device() -> Any:
    return (
        jax.sharding.get_abstract_mesh().abstract_device or jax.config.values["jax_default_device"]
    )


@functools.cache
def _processor() -> str:
    """The processor's name and the number of cores that this process may use."""
    name = machine.processor() or machine.machine()
    with contextlib.suppress(OSError):  # Linux tells its name here only
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else name
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"cpu {name}, {cores} cores"


_PRODUCTS: dict[lax.Precision, Product] = {
    lax.Precision.DEFAULT: "tf32",
    lax.Precision.HIGH: "tf32x3",
    lax.Precision.HIGHEST: "ieee",
}
"""Of float32 operands, as XLA reads a precision on a GPU."""


def product(dtype: DTypeLike, precision: lax.PrecisionLike) -> Product:
    """The product that `precision` asks for of operands of `dtype`, as XLA reads it on a GPU.

    16-bit operands have one product, whatever the precision. None is what
    `jax.default_matmul_precision` says.

    Raises:
      ValueError: `precision` is none of jax's.
      NotImplementedError: the kernels have no such product.
    """
    try:
        asked = canonicalize_precision(precision)
    except (ValueError, TypeError):
        raise ValueError(f"precision={precision!r} must be one of jax.lax.Precision's") from None
    if dtype in (jnp.bfloat16, jnp.float16):
        return "operands"
    if dtype != jnp.float32:
        raise NotImplementedError(
            f"operands of {jnp.dtype(dtype)} have no kernel: bfloat16, float16 and float32 have; "
            "backend='xla' takes any"
        )
    for each, name in _PRODUCTS.items():
        if asked in ((each, each), None):
            return name
    raise NotImplementedError(
        f"precision={precision!r} has no kernel: 'default', 'high' and 'highest' have; "
        "backend='xla' takes any"
    )


def is_default(precision: lax.PrecisionLike) -> bool:
    """Whether a precision is the one that the tuner measures with."""
    return canonicalize_precision(precision) in (None, (lax.Precision.DEFAULT,) * 2)


def precision(product: Product) -> lax.Precision | None:
    """What XLA calls a product of the kernels."""
    return {name: each for each, name in _PRODUCTS.items()}.get(product)


def call(
    kernel: Callable[..., None],
    *operands: Array,
    grid: Sequence[int],
    out: Sequence[jax.ShapeDtypeStruct],
    blocks: Blocks,
    backend: Backend,
    algorithm: str,
    flops: int,
) -> list[Array]:
    """Runs `kernel` on references to the operands and the outputs, once for each point of `grid`.

    Every reference is to a whole array, row-major; a kernel finds its own tile.

    Args:
      kernel: takes a reference to each operand, then one to each output.
      *operands: arrays, row-major.
      grid: at most three axes; the first runs fastest.
      out: shape and dtype of each output.
      blocks: the kernel's, of which this reads `warps` and `stages`.
      backend: "triton" or "interpret".
      algorithm: the name of the kernel, for profilers and the inspector.
      flops: of the launch; XLA's scheduler and the inspector read it.

    Raises:
      NotImplementedError: an array has 2³¹ elements or more (a kernel's offsets are 32 bits); the
        program turns out not to be for a GPU; or it is interpreted in a `shard_map` that checks.
    """
    for array in (*operands, *out):
        if array.size >= COUNTABLE:
            raise NotImplementedError(
                f"an array of shape {array.shape} has {array.size} elements, but kernels count "
                "in 32 bits: use backend='xla'"
            )
    moved = sum(array.size * array.dtype.itemsize for array in (*operands, *out))
    first, *others = operands
    if backend == "triton":
        first = _on_gpu.bind(first)
    # Inside a shard_map the outputs vary over the mesh as the operands do.
    varying = jax.typeof(first).manual_axis_type
    if backend == "interpret" and varying.varying:
        raise NotImplementedError(
            "backend='interpret' needs check_vma=False in shard_map: Pallas's interpreter does not "
            "follow the axes over which arrays vary"
        )
    run = pl.pallas_call(
        kernel,
        grid=tuple(grid),
        out_shape=[
            jax.ShapeDtypeStruct(each.shape, each.dtype, manual_axis_type=varying) for each in out
        ],
        interpret=backend == "interpret",
        compiler_params=pallas_triton.CompilerParams(
            num_warps=blocks.warps, num_stages=blocks.stages
        ),
        cost_estimate=pl.CostEstimate(flops=flops, bytes_accessed=moved, transcendentals=0),
        name=algorithm,
        metadata={"blocks": json.dumps(asdict(blocks))},
    )
    return list(run(first, *others))


def _refuse(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "backend='triton' needs an NVIDIA GPU, and this program is for another device: "
        "backend='xla' runs anywhere, and so does backend='interpret', slowly"
    )


# What hardware a program is for is known when it is lowered, so this is where a kernel can refuse.
_on_gpu = Primitive("on_gpu")
_on_gpu.def_abstract_eval(lambda x: x)
_on_gpu.def_impl(lambda x: jax.jit(_on_gpu.bind)(x))
mlir.register_lowering(_on_gpu, _refuse)
mlir.register_lowering(_on_gpu, lambda context, x: [x], platform="cuda")


def load(ref: Any, mask: Bool[Array, "..."] | None = None) -> Array:
    """What `ref` holds, and zero where `mask` is false; nothing is read there."""
    # Pallas makes a zero of other types from an integer's, but not one of an 8-bit float.
    zero = jnp.zeros((), ref.dtype) if ref.dtype in EIGHT_BITS else 0
    return pallas_triton.load(ref, mask=mask, other=None if mask is None else zero)


def store(ref: Any, value: Array, mask: Bool[Array, "..."] | None = None) -> None:
    """Writes `value`, cast, where `mask` is true."""
    pallas_triton.store(ref, value.astype(ref.dtype), mask=mask)


def dot(
    a: Float[Array, "m k"],
    b: Float[Array, "k n"],
    accumulator: Float[Array, "m n"],
    product: Product,
) -> Float[Array, "m n"]:
    """accumulator + a b, in one matrix instruction where the hardware has one."""
    return _dot.bind(a, b, accumulator, product=product)


_dot = Primitive("dot")
_dot.def_abstract_eval(lambda a, b, accumulator, *, product: accumulator)


def _interpret_dot(a: Array, b: Array, accumulator: Array, *, product: Product) -> Array:
    # The interpreter proves arithmetic, so it multiplies float32 as float32 whatever `product` is.
    if a.dtype in EIGHT_BITS:  # two types of 8 bits have no common one
        a, b = a.astype(accumulator.dtype), b.astype(accumulator.dtype)
    return accumulator + jnp.matmul(
        a, b, precision=lax.Precision.HIGHEST, preferred_element_type=accumulator.dtype
    )


mlir.register_lowering(_dot, mlir.lower_fun(_interpret_dot, multiple_results=False))


@triton_lowering.register_lowering(_dot)
def _lower_dot(context, a, b, accumulator, *, product: Product):
    precisions = {
        "operands": None,
        "tf32": triton_dialect.InputPrecision.TF32,
        "tf32x3": triton_dialect.InputPrecision.TF32x3,
        "ieee": triton_dialect.InputPrecision.IEEE,
    }
    left = context.avals_in[0]
    # Without a limit to the partial sums Triton multiplies 8-bit floats as 16-bit ones on sm_90.
    limit = min(PARTIAL_SUM, left.shape[1]) if left.dtype in EIGHT_BITS else None
    return triton_dialect.dot(
        a, b, accumulator, input_precision=precisions[product], max_num_imprecise_acc=limit
    )
