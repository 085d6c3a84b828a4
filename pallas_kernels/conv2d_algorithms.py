"""Five ways to compute a convolution in plain jnp, and which of them is fastest where.

Each is linear in x and in w, so its transposes are gradients by the same algorithm: `conv2d` runs
one on (x, w) for the output, one on (dx, w) for the gradient of x and one on (x, dw) for the
gradient of w.

  direct     XLA's own convolution; on a GPU, cuDNN's.
  im2col     a matrix of all patches [kh·kw, pixels, c_in] and one product; it takes kh·kw times
             the memory of x. Chellapilla, Puri and Simard, "High Performance Convolutional Neural
             Networks for Document Processing", 2006.
  shifted    one product for each tap of the kernel: the image shifted by the tap, times the tap's
             [c_in, c_out] matrix. For depthwise kernels the products are elementwise.
  pointwise  for 1×1 kernels: the strided image times w.
  patches    for kernels as large as their strides: a reshape and one product.

Read `Convolution`, the five in this order, then `run` and `default_algorithms`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import launch, windows
from pallas_kernels.windows import Windows

Layout = Literal["NHWC", "NCHW", "CHWN"]
Algorithm = Literal[
    "direct", "im2col", "shifted", "pointwise", "patches", "implicit_gemm", "direct_chwn"
]
Operand = Literal["x", "w"]

Image = Float[Array, "b h w c_in"]
Kernel = Float[Array, "kh kw c_in_per_group c_out"]
Output = Float[Array, "b out_h out_w c_out"]


@dataclass(frozen=True)
class Convolution:
    """All there is to know about a convolution but its operands and their batch."""

    rows: Windows
    columns: Windows
    c_in: int
    c_out: int
    groups: int
    layout: Layout
    precision: lax.PrecisionLike

    @property
    def taps(self) -> int:
        """kh·kw."""
        return self.rows.taps * self.columns.taps

    @property
    def padded(self) -> bool:
        return self.rows.padded or self.columns.padded

    @property
    def depthwise(self) -> bool:
        return self.groups == self.c_in


class Algorithms(NamedTuple):
    """The algorithm of each pass."""

    forward: Algorithm
    input_gradient: Algorithm
    kernel_gradient: Algorithm


class Axes(NamedTuple):
    """The order in which XLA's convolution is given the axes of each array."""

    x: str
    w: str
    y: str


TRANSPOSABLE: dict[Operand, Axes] = {
    "x": Axes("NHWC", "HWOI", "NHWC"),
    "w": Axes("CHWN", "IHWO", "HWNC"),
}
"""The axes of a convolution whose transpose in x, or in w, is of NHWC by HWIO to NHWC.

The transpose contracts c_out, or the images: to it they are the channels, so they lie last. On a
CPU, XLA is fast in this order only and does any other by plain loops. It puts convolutions in
order itself, but none in the body of a loop, where a ResNet has its equal blocks. CPU time there,
on a busy x86 machine, jax 0.10, float32, of the gradients of two layers 3×3 (as what jax makes of
a plain convolution, in this order, without a loop), and of a training step:

  64 × 14×14 × 16                   199 →   22,    20 ms
  64 × 28×28 × 16                  1360 →  234,   212 ms
  resnet20_cifar, 64 × 32×32 × 3  17000 → 1740 ms

The price: in forward mode, in a loop on a CPU, the tangents are what is in the slow order.
"""


def _direct(
    x: Float[Array, "_ _ _ _"],
    w: Kernel,
    convolution: Convolution,
    dtype: DTypeLike,
    transposed: Operand | None = None,
) -> Float[Array, "_ _ _ _"]:
    rows, columns, layout = convolution.rows, convolution.columns, convolution.layout
    axes = Axes(layout, "HWIO", layout)
    if transposed is not None and convolution.groups == 1 and launch.platform() == "cpu":
        axes = TRANSPOSABLE[transposed]
    # No preferred_element_type: XLA and cuDNN add up in float32 and round once to x's dtype, but
    # asked for float32 from bfloat16 they convert x and w and do all of it in float32.
    y = lax.conv_general_dilated(
        _reorder(x, layout, axes.x),
        _reorder(w, "HWIO", axes.w),
        window_strides=(rows.stride, columns.stride),
        padding=((rows.before, rows.after), (columns.before, columns.after)),
        rhs_dilation=(rows.dilation, columns.dilation),
        dimension_numbers=axes,
        feature_group_count=convolution.groups,
        precision=convolution.precision,
    )
    return _reorder(y, axes.y, layout).astype(dtype)


def _reorder(array: Array, axes: str, order: str) -> Array:
    return array.transpose([axes.index(axis) for axis in order])


def _im2col(x: Image, w: Kernel, convolution: Convolution, dtype: DTypeLike) -> Output:
    rows, columns = convolution.rows, convolution.columns
    padded = windows.pad(x, rows, columns)
    # Columns first, then rows: kh + kw slices to compile, not kh·kw.
    across = jnp.stack([columns.tap(padded, j, axis=2) for j in range(columns.taps)])
    patches = jnp.stack([rows.tap(across, i, axis=2) for i in range(rows.taps)])
    return jnp.einsum(
        "ijbhwc,ijco->bhwo",
        patches,
        w,
        precision=convolution.precision,
        preferred_element_type=dtype,
    )


def _shifted(x: Image, w: Kernel, convolution: Convolution, dtype: DTypeLike) -> Output:
    if convolution.depthwise:
        return _shifted_depthwise(x, w, convolution).astype(dtype)
    accumulator = jnp.promote_types(dtype, jnp.float32)
    products = (
        jnp.einsum(
            "bhwc,co->bhwo",
            shift,
            tap,
            precision=convolution.precision,
            preferred_element_type=accumulator,
        )
        for shift, tap in zip(
            windows.shifts(x, convolution.rows, convolution.columns),
            w.reshape(convolution.taps, *w.shape[2:]),
            strict=True,
        )
    )
    return reduce(add, products).astype(dtype)


def _shifted_depthwise(x: Image, w: Kernel, convolution: Convolution) -> Output:
    accumulator = jnp.promote_types(x.dtype, jnp.float32)
    shifts = windows.shifts(x.astype(accumulator), convolution.rows, convolution.columns)
    taps = w.reshape(-1, 1, 1, 1, convolution.c_out).astype(accumulator)
    multiplier = convolution.c_out // convolution.c_in
    products = (
        jnp.repeat(shift, multiplier, axis=-1) * tap
        for shift, tap in zip(shifts, taps, strict=True)
    )
    return reduce(add, products)


def _pointwise(x: Image, w: Kernel, convolution: Convolution, dtype: DTypeLike) -> Output:
    seen = x[:, :: convolution.rows.stride, :: convolution.columns.stride]
    return jnp.einsum(
        "bhwi,io->bhwo",
        seen,
        w[0, 0],
        precision=convolution.precision,
        preferred_element_type=dtype,
    )


def _patches(x: Image, w: Kernel, convolution: Convolution, dtype: DTypeLike) -> Output:
    rows, columns = convolution.rows, convolution.columns
    seen = x[:, : rows.count * rows.taps, : columns.count * columns.taps]
    split = seen.reshape(
        x.shape[0], rows.count, rows.taps, columns.count, columns.taps, x.shape[-1]
    )
    return jnp.einsum(
        "bhtwsi,tsio->bhwo",
        split,
        w,
        precision=convolution.precision,
        preferred_element_type=dtype,
    )


ALGORITHMS: dict[Algorithm, Callable[[Array, Array, Convolution, DTypeLike], Array]] = {
    "direct": _direct,
    "im2col": _im2col,
    "shifted": _shifted,
    "pointwise": _pointwise,
    "patches": _patches,
}
"""Those of XLA."""


_FEW = 4
"""Groups that are worth a call of cuDNN each; AlexNet has two."""


def run(
    algorithm: Algorithm,
    x: Float[Array, "_ _ _ _"],
    w: Kernel,
    convolution: Convolution,
    dtype: DTypeLike,
    transposed: Operand | None = None,
) -> Float[Array, "_ _ _ _"]:
    """x * w by `algorithm`; x and the result in the convolution's layout, the result in `dtype`.

    `transposed` is the operand in which the caller is going to transpose this, if any: the result
    is the same, and the transpose is fast.

    Groups are convolutions side by side, except for `direct` where XLA is good at them and for
    `shifted` where they are depthwise. On a CPU, XLA's grouped convolution runs at 10 GFLOP/s
    where one for each group runs at 60. On GPUs it is not split over devices by its images: each
    gathers all of them, in either pass. So a few groups are side by side there too; many, as a
    ResNeXt's, are gathered still.
    """
    compute = ALGORITHMS[algorithm]
    if algorithm == "direct":
        compute = partial(_direct, transposed=transposed)
    layout, groups = convolution.layout, convolution.groups
    platform = launch.platform()
    few = 1 < groups <= _FEW and platform == "gpu"
    if algorithm == "direct" and (convolution.depthwise or (platform != "cpu" and not few)):
        return compute(x, w, convolution, dtype)
    order = layout if algorithm == "direct" and few else "NHWC"
    ordered = replace(convolution, layout=order)
    x = _reorder(x, layout, order)
    if groups == 1 or (algorithm == "shifted" and convolution.depthwise):
        y = compute(x, w, ordered, dtype)
    else:
        c_in, c_out, channels = convolution.c_in, convolution.c_out, order.index("C")
        one = replace(ordered, c_in=c_in // groups, c_out=c_out // groups, groups=1)
        parts = zip(jnp.split(x, groups, channels), jnp.split(w, groups, -1), strict=True)
        y = jnp.concatenate([compute(*part, one, dtype) for part in parts], channels)
    return _reorder(y, order, layout)


def refusal(algorithm: Algorithm, convolution: Convolution) -> str | None:
    """Why `algorithm` cannot compute `convolution`, or None where it can."""
    rows, columns = convolution.rows, convolution.columns
    if algorithm in ("implicit_gemm", "direct_chwn"):
        return "it is a kernel: backend must be 'triton', or 'interpret'"
    if algorithm not in ("pointwise", "patches"):
        return None
    kernel = (rows.taps, columns.taps)
    if algorithm == "pointwise" and kernel != (1, 1):
        return f"the kernel {kernel} must be (1, 1)"
    if algorithm == "patches" and kernel != (rows.stride, columns.stride):
        return (
            f"the kernel {kernel} must be as large as the strides {(rows.stride, columns.stride)}"
        )
    if algorithm == "patches" and (rows.dilation, columns.dilation) != (1, 1):
        return f"the dilation {(rows.dilation, columns.dilation)} must be 1"
    if convolution.padded:
        return "there must be no padding"
    return None


def default_algorithms(convolution: Convolution, platform: str) -> Algorithms:
    """The fastest known algorithm of each pass.

    On a CPU, by measurement: GFLOP/s a core of one x86 machine with AVX2, float32, jax 0.10, as
    output / gradient of x / gradient of w. (`im2col` was measured on a cache's worth of images at a
    time, which this file no longer does: it bounds what that would bring.)

      kernel, c_in → c_out, size      direct        im2col        shifted       product
      3×3    16 → 16   28         32 / 32 / 12   9 / 27 / 14  13 / 18 / 6
      3×3    64 → 64   56         49 / 66 / 14  18 / 41 / 24  17 / 22 / 10
      3×3   256 → 256  14         53 / 50 / 21  44 / 51 / 41  55 / 52 / 41
      3×3/2 256 → 256  28         42 / 57 / 21  36 / 47 / 38  32 / 50 / 34
      3×3     1 → 16   28          3 / 3 / 3     4 / 7 / 4    21 / 6 / 3
      1×1  1024 → 256  14         37 / 42 / 9                               51 / 49 / 37
      1×1/2 256 → 512  56         57 / 43 / 4                               66 / 49 / 38
      16×16/16 3 → 384 224        41 / 3 / 22                               62 / 52 / 36

    What a layer gains alone it can lose in a network: the quickstart's training step takes 66 ms of
    CPU time with `direct` kernel gradients, 71 with `shifted` and 75 with `im2col`, and `direct`
    compiles in half the time. So 3×3 kernels stay with it until a tuner chooses for the network.
    (Three 3×3 layers, forward and backward, with `shifted` kernel gradients over a cache's worth of
    images at a time: 64 channels at 56, 254 → 142 ms; 128 at 28, 347 → 243; 256 at 14, no gain.)

    Elsewhere cuDNN (or the TPU's compiler) chooses, except that patches are one matrix product,
    exactly, on any hardware.
    """
    if convolution.taps > 1 and refusal("patches", convolution) is None:
        return Algorithms("patches", "patches", "patches")
    if platform != "cpu":
        return Algorithms("direct", "direct", "direct")
    if refusal("pointwise", convolution) is None:
        return Algorithms("pointwise", "pointwise", "pointwise")
    if convolution.c_in == 1:
        return Algorithms("shifted", "direct", "direct")
    if convolution.depthwise:
        return Algorithms("shifted", "shifted", "shifted")
    return Algorithms("direct", "direct", "direct")
