"""Two-dimensional convolution with a fused epilogue.

y[b, p, q, o] = activation(Σ_{i, j, c} x[b, p·stride + i·dilation - top, …, c] w[i, j, c, o]
                           + bias[o] + residual[b, p, q, o])

This is the cross-correlation that the field calls convolution. FLOPs: 2·b·pixels·kh·kw·c_in/groups
·c_out. Bytes at best: x, w, bias and residual read once and y written once; the epilogue adds no
pass over y. Low precision is accumulated in float32. Kept for the backward pass: x, w and what
`epilogue` keeps, never a copy of x for each tap.

The three passes of training (the output, the gradient of x, the gradient of w) are three different
computations, and the fastest algorithm for one is not the fastest for another:
`conv2d_algorithms` has the algorithms and chooses.
"""

from functools import partial, reduce
from operator import add
from typing import get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import epilogue, launch, windows
from pallas_kernels.conv2d_algorithms import (
    Algorithm,
    Algorithms,
    Convolution,
    Kernel,
    Layout,
    default_algorithms,
    refusal,
    run,
)
from pallas_kernels.epilogue import Activation
from pallas_kernels.launch import Backend
from pallas_kernels.windows import Padding, Pair


def reference(
    x: Float[Array, "_ _ _ _"],
    w: Kernel,
    *,
    strides: Pair = (1, 1),
    padding: Padding = "SAME",
    dilation: Pair = (1, 1),
    groups: int = 1,
    layout: Layout = "NHWC",
    bias: Float[Array, " c_out"] | None = None,
    residual: Float[Array, "_ _ _ _"] | None = None,
    activation: Activation | None = None,
) -> Float[Array, "_ _ _ _"]:
    """The equation in float32 at the highest precision: what every backend is measured against."""
    accumulator = lax.conv_general_dilated(
        x.astype(jnp.float32),
        w.astype(jnp.float32),
        strides,
        padding,
        rhs_dilation=dilation,
        dimension_numbers=(layout, "HWIO", layout),
        feature_group_count=groups,
        precision=lax.Precision.HIGHEST,
    )
    return epilogue.apply(
        accumulator,
        bias=bias,
        residual=residual,
        activation=activation,
        out_dtype=jnp.float32,
        channel_axis=layout.index("C"),
    )


@partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _convolve(x: Array, w: Array, convolution: Convolution, algorithms: Algorithms) -> Array:
    """x * w, accumulated and returned in float32, or in float64 for float64."""
    accumulator = jnp.promote_types(x.dtype, jnp.float32)
    return run(algorithms.forward, x, w, convolution, accumulator)


# Keeps its operands for the backward pass, not the copies that an algorithm makes of them.
_run_keeping_operands = jax.checkpoint(run, static_argnums=(0, 3, 4))


@partial(_convolve.defjvp, symbolic_zeros=True)
def _convolve_jvp(convolution, algorithms, primals, tangents):
    # The tangent is linear in (dx, dw) and its transpose is the gradient. So this is where each
    # pass gets its own algorithm, and where bfloat16 operands get bfloat16 products backward too.
    (x, w), (dx, dw) = primals, tangents
    _, input_gradient, kernel_gradient = algorithms
    y = _convolve(x, w, convolution, algorithms)
    terms = []
    if not isinstance(dx, SymbolicZero):
        terms.append(_run_keeping_operands(input_gradient, dx, w, convolution, x.dtype))
    if not isinstance(dw, SymbolicZero):
        terms.append(_run_keeping_operands(kernel_gradient, x, dw, convolution, x.dtype))
    return y, reduce(add, terms).astype(y.dtype)


def conv2d(
    x: Float[Array, "_ _ _ _"],
    w: Kernel,
    *,
    strides: Pair = (1, 1),
    padding: Padding = "SAME",
    dilation: Pair = (1, 1),
    groups: int = 1,
    layout: Layout = "NHWC",
    bias: Float[Array, " c_out"] | None = None,
    residual: Float[Array, "_ _ _ _"] | None = None,
    activation: Activation | None = None,
    out_dtype: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    backend: Backend = "auto",
    algorithm: Algorithm | None = None,
    blocks: None = None,
) -> Float[Array, "_ _ _ _"]:
    """activation(x * w + bias + residual), differentiable any number of times in either mode.

    Args:
      x: images, in `layout`.
      w: kernels, HWIO in every layout: [kh, kw, c_in / groups, c_out].
      strides: pixels of x, (down, across), from one output pixel to the next.
      padding: zeros around x: ((top, bottom), (left, right)) pixels, "VALID" for none, or "SAME"
        for ceil(size / stride) output pixels, which is not symmetric.
      dilation: pixels of x, (down, across), from one tap of the kernel to the next.
      groups: output channels see one part of `groups` of the input channels; c_in is depthwise.
      layout: of x, residual and the result.
      bias: one number for each output channel.
      residual: added before the activation.
      activation: applied in float32.
      out_dtype: the result's; by default the common dtype of x and w.
      precision: of the products, as in `jax.lax.conv_general_dilated`.
      backend: "xla", or "auto".
      algorithm: the XLA backend's way to do all three passes; by default the fastest known way to
        do each (`conv2d_algorithms.default_algorithms`).
      blocks: block sizes, for backends that have blocks.

    Raises:
      TypeError: x or w is not floating.
      ValueError: the shapes do not fit, `algorithm` cannot do this case, or a name or `blocks` is
        refused.
      NotImplementedError: the backend is not there yet.
    """
    launch.resolve("conv2d", backend, available=("xla",), blocks=blocks)
    epilogue.check_floating(x=x, w=w)
    _check_name("layout", layout, get_args(Layout))
    _check_name("algorithm", algorithm, (None, *get_args(Algorithm)))
    if x.ndim != 4 or w.ndim != 4:
        raise ValueError(f"x of shape {x.shape} and w of shape {w.shape} must have four axes")
    size = dict(zip(layout, x.shape, strict=True))
    rows, columns = windows.resolve(
        (size["H"], size["W"]),
        (w.shape[0], w.shape[1]),
        strides=strides,
        padding=padding,
        dilation=dilation,
    )
    _check_channels(size["C"], w.shape, groups)
    convolution = Convolution(rows, columns, size["C"], w.shape[3], groups, layout, precision)
    out_size = {"N": size["N"], "H": rows.count, "W": columns.count, "C": convolution.c_out}
    channel_axis = layout.index("C")
    epilogue.check(
        tuple(out_size[axis] for axis in layout),
        bias=bias,
        residual=residual,
        activation=activation,
        channel_axis=channel_axis,
    )
    dtype = jnp.promote_types(x.dtype, w.dtype)
    return epilogue.apply(
        _convolve(x.astype(dtype), w.astype(dtype), convolution, _choose(algorithm, convolution)),
        bias=bias,
        residual=residual,
        activation=activation,
        out_dtype=out_dtype or dtype,
        channel_axis=channel_axis,
    )


def _check_name(parameter: str, name: str | None, names: tuple[str | None, ...]) -> None:
    if name not in names:
        raise ValueError(f"{parameter}={name!r} must be one of {', '.join(map(repr, names))}")


def _check_channels(c_in: int, kernel: tuple[int, ...], groups: int) -> None:
    _, _, c_in_per_group, c_out = kernel
    for name, channels in (("c_in", c_in), ("c_out", c_out)):
        if groups < 1 or channels % groups:
            raise ValueError(f"groups={groups} must divide {name}={channels}")
    if c_in_per_group * groups != c_in:
        raise ValueError(
            f"w of shape {kernel} must have c_in / groups = {c_in // groups} input channels"
        )


def _choose(algorithm: Algorithm | None, convolution: Convolution) -> Algorithms:
    if algorithm is None:
        return default_algorithms(convolution, launch.platform())
    if reason := refusal(algorithm, convolution):
        raise ValueError(f"algorithm={algorithm!r} cannot do this: {reason}")
    return Algorithms(algorithm, algorithm, algorithm)
