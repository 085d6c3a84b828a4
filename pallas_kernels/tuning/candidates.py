"""The ways to do one pass of a call, the default first and then the most promising.

XLA's own is always among them: on a GPU that is cuDNN's or cuBLAS's choice. What cannot be built is
not: an algorithm that refuses the shape, and a matrix of patches that would not fit in memory. What
the compiler makes of kernels is not asked here, but by `screening`, when their turn comes.
"""

from collections.abc import Callable, Iterable
from math import prod

import jax.numpy as jnp

from pallas_kernels import conv2d_algorithms, conv2d_kernels, direct_chwn, implicit_gemm
from pallas_kernels.attention import search_space as attention_search_space
from pallas_kernels.blocks import Blocks, ceiling
from pallas_kernels.calls import (
    Attention,
    Call,
    Conv2d,
    CrossEntropy,
    LayerNorm,
    LocalResponseNorm,
    Matmul,
    MaxPool,
    Pass,
)
from pallas_kernels.conv2d_algorithms import ALGORITHMS, Algorithm, Convolution
from pallas_kernels.cross_entropy import search_space as cross_entropy_search_space
from pallas_kernels.layer_norm import search_space as layer_norm_search_space
from pallas_kernels.local_response_norm import search_space as local_response_norm_search_space
from pallas_kernels.matmul import MULTIPROCESSORS
from pallas_kernels.matmul import search_space as matmul_search_space
from pallas_kernels.max_pool import search_space as max_pool_search_space
from pallas_kernels.selection import Choice

LARGEST_COPY = 2**31
"""Bytes that an algorithm may copy its images to."""


def candidates(call: Call, which: Pass, platform: str) -> list[Choice]:
    """The ways to do a pass of `call` on a platform, as `launch.platform` names it.

    The first is what is done where nothing was measured.
    """
    if isinstance(call, Conv2d):
        return list(_convolutions(call, which, platform))
    if platform != "gpu":
        return [Choice("xla")]
    kernel = Choice("triton")
    if isinstance(call, Matmul):
        others = _by_estimate(_product_of(call, which), call.dtype, matmul_search_space)
    else:
        others = [Choice("triton", None, blocks) for blocks in _blocks_of(call)]
    first = [kernel, Choice("xla")] if _is_kernel_first(call) else [Choice("xla"), kernel]
    return [*first, *others]


def _is_kernel_first(call: Call) -> bool:
    """Whether an operation on a GPU is a kernel where nothing was measured."""
    if isinstance(call, MaxPool):
        return _fills_a_load(_pooled(call)[-1], call.dtype)
    if isinstance(call, LocalResponseNorm):
        _, group, inner = _grouped(call)
        neighbours = group if call.layout.endswith("C") else inner
        return _fills_a_load(neighbours, call.dtype) and call.size <= 9
    return not (call.is_product and call.dtype == "float32")


def _fills_a_load(neighbours: int, dtype: str) -> bool:
    """Whether a thread's 16 bytes are all of so many neighbours in memory, or of the next ones."""
    return neighbours * jnp.dtype(dtype).itemsize % 16 == 0


def _pooled(call: MaxPool) -> tuple[int, ...]:
    """A pooling's result as its kernel sees it, pixels before the last axis."""
    return (*call.y, 1) if call.layout == "NCHW" else call.y


def _grouped(call: LocalResponseNorm) -> tuple[int, int, int]:
    """(groups of channels, channels of a group, what follows them) of x."""
    axis = call.layout.index("C")
    groups = prod(call.x[:axis]) * call.groups
    return groups, call.x[axis] // call.groups, prod(call.x[axis + 1 :])


def _blocks_of(call: Call) -> list[Blocks]:
    """The search space of an operation whose passes go together."""
    if isinstance(call, Attention):
        shape = (call.q[1], call.k[1], call.q[3])
        return attention_search_space(shape, call.dtype, causal=call.causal)
    if isinstance(call, LayerNorm):
        return layer_norm_search_space((prod(call.x[:-1]), call.x[-1]), call.dtype)
    if isinstance(call, CrossEntropy):
        return cross_entropy_search_space((prod(call.y), call.logits[-1]), call.dtype)
    if isinstance(call, LocalResponseNorm):
        return local_response_norm_search_space(_grouped(call), call.dtype)
    if isinstance(call, MaxPool):
        return max_pool_search_space(_pooled(call), call.dtype)
    return []


def _convolutions(call: Conv2d, which: Pass, platform: str) -> Iterable[Choice]:
    convolution = _convolution(call)
    default: Algorithm = getattr(conv2d_algorithms.default_algorithms(convolution, platform), which)
    ordered: list[Algorithm] = sorted(ALGORITHMS, key=lambda name: _copied(name, call))
    ordered.remove(default)
    xla = [Choice("xla", default)]
    for algorithm in ordered:
        refused = conv2d_algorithms.refusal(algorithm, convolution)
        if refused is None and _copied(algorithm, call) <= LARGEST_COPY:
            xla.append(Choice("xla", algorithm))
    if platform != "gpu":
        yield from xla
        return
    kernels: list[Choice] = []
    first = conv2d_kernels.default_algorithm(convolution, call.batch)
    one_product = first in ("pointwise", "patches")
    for algorithm in (first,) if one_product else _KERNELS:
        if conv2d_kernels.refusal(algorithm, convolution) is None:
            space = _BLOCKS[algorithm]
            if which == "kernel_gradient" and not one_product:
                space = _sums
            kernels.append(Choice("triton", algorithm))
            kernels += _by_estimate(_product_of(call, which), call.dtype, space, algorithm)
    kernels.sort(key=lambda choice: choice != Choice("triton", first))
    if conv2d_kernels.preferred(convolution, call.batch, jnp.dtype(call.dtype), None, None):
        yield kernels.pop(0)
    yield from xla
    yield from kernels


def _convolution(call: Conv2d) -> Convolution:
    rows, columns = call.windows
    c_in = call.x[call.layout.index("C")]
    return Convolution(rows, columns, c_in, call.w[3], call.groups, call.layout, None)


def _copied(algorithm: str, call: Conv2d) -> int:
    """Bytes of the copies of its images that an algorithm makes, at most."""
    pixels = prod(call.y) // call.w[3]
    channels = call.x[call.layout.index("C")]
    copies = {"im2col": prod(call.w[:2]), "shifted": 1}.get(algorithm, 0)
    return copies * pixels * channels * jnp.dtype(call.dtype).itemsize


def _product_of(call: Conv2d | Matmul, which: Pass) -> tuple[int, int, int]:
    """(m, n, k) of the product that a pass is."""
    if isinstance(call, Matmul):
        *batch, m, k = call.a
        n = call.b[-1]
        m *= prod(batch) if len(call.b) == 2 else 1
    else:
        m, n, k = prod(call.y) // call.w[3], call.w[3] // call.groups, prod(call.w[:3])
    if which == "forward":
        return m, n, k
    if which == "kernel_gradient":
        return k, n, m
    if isinstance(call, Conv2d):
        taps, channels = prod(call.w[:2]), call.w[2]
        return prod(call.x) // (channels * call.groups), channels, taps * n
    return m, k, n


def _sums(shape: tuple[int, int, int], dtype: str) -> list[Blocks]:
    return implicit_gemm.search_space(shape, dtype, sums=True)


_KERNELS: tuple[Algorithm, ...] = ("implicit_gemm", "direct_chwn")

_BLOCKS: dict[str, Callable[[tuple[int, int, int], str], list[Blocks]]] = {
    "pointwise": matmul_search_space,
    "patches": matmul_search_space,
    "implicit_gemm": implicit_gemm.search_space,
    "direct_chwn": direct_chwn.search_space,
}


def _by_estimate(
    shape: tuple[int, int, int],
    dtype: str,
    space: Callable[[tuple[int, int, int], str], list[Blocks]],
    algorithm: str | None = None,
) -> list[Choice]:
    """A kernel with all blocks of its search space, by an estimate of time."""
    found = sorted(space(shape, dtype), key=lambda blocks: _estimate(shape, blocks))
    return [Choice("triton", algorithm, blocks) for blocks in found]


def _estimate(shape: tuple[int, int, int], blocks: Blocks) -> float:
    """A time without unit: the slower of a tile's arithmetic and its reads from the L2 cache, which
    an H200 does at about 200 FLOPs a byte, times the rounds in which tiles are made."""
    m, n, k = shape
    tiles = ceiling(m, blocks.m) * ceiling(n, blocks.n) * blocks.splits
    depth = ceiling(k, blocks.k * blocks.splits) * blocks.k
    arithmetic = 2 * blocks.m * blocks.n * depth
    reads = 200 * 2 * (blocks.m + blocks.n) * depth
    return float(ceiling(tiles, MULTIPROCESSORS) * max(arithmetic, reads))
