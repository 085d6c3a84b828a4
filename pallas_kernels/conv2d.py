"""Two-dimensional convolution with a fused epilogue.

y[b, p, q, o] = activation(Σ_{i, j, c} x[b, p·stride + i·dilation - top, …, c] w[i, j, c, o]
                           + bias[o] + residual[b, p, q, o])

This is the cross-correlation that the field calls convolution. FLOPs: 2·b·pixels·kh·kw·c_in/groups
·c_out. Bytes at best: x, w, bias and residual read once and y written once; the epilogue adds no
pass over y. Low precision is accumulated in float32. Kept for the backward pass: x, w and what
`epilogue` keeps, never a copy of x for each tap, except by the kernels' `im2col`.

The three passes of training (the output, the gradient of x, the gradient of w) are three different
computations, and the fastest algorithm for one is not the fastest for another. `conv2d_xla` has
those of XLA, of which `conv2d_algorithms` is the list; `conv2d_kernels` has the Pallas kernels
`implicit_gemm` and `direct_chwn`. `conv2d_transpose` is the adjoint: for any x and y of fitting
shapes, ⟨conv2d(x, w), y⟩ = ⟨x, conv2d_transpose(y, w)⟩.
"""

from functools import partial
from operator import index
from typing import get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import calls, conv2d_kernels, conv2d_xla, epilogue, launch, windows
from pallas_kernels.blocks import Blocks
from pallas_kernels.conv2d_algorithms import Algorithm, Convolution, Kernel, Layout
from pallas_kernels.epilogue import Activation
from pallas_kernels.launch import Backend
from pallas_kernels.taps import Direction
from pallas_kernels.transformations import typed
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
    blocks: Blocks | None = None,
) -> Float[Array, "_ _ _ _"]:
    """activation(x * w + bias + residual).

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
      precision: of the products, as in `jax.lax.conv_general_dilated`. The kernels multiply float32
        in tf32 unless it is "high" (three tf32 products) or "highest" (float32, without Tensor
        Cores).
      backend: "xla", differentiable any number of times in either mode; "triton", the kernels, on a
        GPU, any number of times in reverse mode; "interpret", the kernels' arithmetic on any
        hardware; "auto", what the tuner measured to be the fastest for each pass (`tune`), else
        XLA, except that on a GPU batch-last 16-bit images go to the kernel made for them, which
        cuDNN would transpose. Where "auto" is a kernel, it has a kernel's derivatives.
      algorithm: the way to do all three passes; by default the backend's own choice for each
        (`conv2d_algorithms.default_algorithms`, `conv2d_kernels.default_algorithm`).
      blocks: the forward kernel's; by default the kernel's own `default_blocks`.

    Raises:
      TypeError: x or w is not floating.
      ValueError: the shapes do not fit, `algorithm` cannot do this case, or a name or `blocks` is
        refused.
      NotImplementedError: a kernel was asked for by name and cannot do this dtype or precision, or
        its forward-mode derivative was asked for.
    """
    _check_operands("x", x, w, layout, algorithm)
    x, w = jnp.asarray(x), jnp.asarray(w)
    size = dict(zip(layout, x.shape, strict=True))
    rows, columns = windows.resolve(
        (size["H"], size["W"]), _taps(w), strides=strides, padding=padding, dilation=dilation
    )
    _check_channels("c_in", size["C"], w.shape, groups)
    convolution = Convolution(rows, columns, size["C"], w.shape[3], groups, layout, precision)
    out_size = {"N": size["N"], "H": rows.count, "W": columns.count, "C": convolution.c_out}
    return _with_epilogue(
        x, w, tuple(out_size[axis] for axis in layout), convolution, "forward",
        bias=bias, residual=residual, activation=activation, out_dtype=out_dtype,
        backend=backend, algorithm=algorithm, blocks=blocks,
    )  # fmt: skip


def conv2d_transpose(
    y: Float[Array, "_ _ _ _"],
    w: Kernel,
    *,
    strides: Pair = (1, 1),
    padding: Padding = "SAME",
    dilation: Pair = (1, 1),
    groups: int = 1,
    layout: Layout = "NHWC",
    bias: Float[Array, " c_in"] | None = None,
    residual: Float[Array, "_ _ _ _"] | None = None,
    activation: Activation | None = None,
    out_dtype: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    backend: Backend = "auto",
    algorithm: Algorithm | None = None,
    blocks: Blocks | None = None,
    size: Pair | None = None,
) -> Float[Array, "_ _ _ _"]:
    """activation(the adjoint of `conv2d` with the same arguments, of y, + bias + residual).

    It takes what `conv2d` gives, images of c_out channels, to what `conv2d` takes, images of c_in.

    Args:
      y: images of c_out channels, in `layout`.
      w: the kernels of the `conv2d` whose adjoint this is, [kh, kw, c_in / groups, c_out].
      strides: of that `conv2d`, like the next four.
      padding: of x, the result; so it takes pixels away.
      dilation: pixels of x from one tap to the next.
      groups: of channels.
      layout: of y, residual and the result.
      bias: one number for each of the c_in channels.
      residual: added before the activation.
      activation: applied in float32.
      out_dtype: the result's; by default the common dtype of y and w.
      precision: as for `conv2d`.
      backend: as for `conv2d`.
      algorithm: as for `conv2d`; the one whose gradient of x this is.
      blocks: the kernel's.
      size: (height, width) of the result. Where strides skip pixels, several sizes give `conv2d`
        the same output: by default this is the smallest, and with "SAME" y's size times `strides`.

    Raises:
      TypeError, ValueError, NotImplementedError: as `conv2d`, and ValueError for a `size` from
        which `conv2d` makes no image of y's.
    """
    _check_operands("y", y, w, layout, algorithm)
    y, w = jnp.asarray(y), jnp.asarray(w)
    extent = dict(zip(layout, y.shape, strict=True))
    counts = extent["H"], extent["W"]
    if size is not None:
        windows.check_pair("size", size)
    windows.check(_taps(w), strides=strides, padding=padding, dilation=dilation)
    resolve = partial(
        windows.resolve, size=_taps(w), strides=strides, padding=padding, dilation=dilation
    )
    rows, columns = resolve(size or windows.smallest(counts, _taps(w), strides, padding, dilation))
    if (rows.count, columns.count) != counts:
        raise ValueError(
            f"size={size} has {(rows.count, columns.count)} windows, but y of shape {y.shape} has "
            f"{counts} pixels"
        )
    _check_channels("c_out", extent["C"], w.shape, groups)
    convolution = Convolution(
        rows, columns, w.shape[2] * groups, w.shape[3], groups, layout, precision
    )
    out_size = {"N": extent["N"], "H": rows.extent, "W": columns.extent, "C": convolution.c_in}
    return _with_epilogue(
        y, w, tuple(out_size[axis] for axis in layout), convolution, "transposed",
        bias=bias, residual=residual, activation=activation, out_dtype=out_dtype,
        backend=backend, algorithm=algorithm, blocks=blocks,
    )  # fmt: skip


def _with_epilogue(
    source: Array, w: Array, shape: tuple[int, ...], convolution: Convolution,
    direction: Direction, *, bias: Array | None, residual: Array | None,
    activation: Activation | None, out_dtype: DTypeLike | None, backend: Backend,
    algorithm: Algorithm | None, blocks: Blocks | None,
) -> Array:  # fmt: skip
    """The convolution or its transpose on a backend, with an output of `shape`."""
    layout = convolution.layout
    epilogue.check(
        shape,
        bias=bias,
        residual=residual,
        activation=activation,
        channel_axis=layout.index("C"),
    )
    dtype = jnp.promote_types(source.dtype, w.dtype)
    source, w = source.astype(dtype), w.astype(dtype)
    out_dtype = jax.dtypes.canonicalize_dtype(out_dtype or dtype)
    images = source.shape[layout.index("N")]
    call = None
    by_default = launch.platform() != "gpu" or launch.is_default(convolution.precision)
    if backend == "auto" and algorithm is None and blocks is None and by_default:
        terms = {"bias": bias is not None, "residual": residual is not None}
        call = _call(images, convolution, dtype, out_dtype, activation=activation, **terms)
    kernel_first = launch.platform() == "gpu" and conv2d_kernels.preferred(
        convolution, images, dtype, algorithm, call
    )
    operation = "conv2d" if direction == "forward" else "conv2d_transpose"
    backend = launch.resolve(
        operation, backend, available=launch.ranked(kernel_first), blocks=blocks
    )
    if backend == "xla" or 0 in (*source.shape, *w.shape, *shape):
        plan = conv2d_xla.plan(convolution, algorithm if backend == "xla" else None, call)
        adjoint = direction == "transposed"
        compute = conv2d_xla.convolve_transpose if adjoint else conv2d_xla.convolve
        terms = {"bias": bias, "residual": residual}
        given = {name: term for name, term in terms.items() if term is not None}

        def whole(source: Array, w: Array, *terms: Array) -> Array:
            return epilogue.apply(
                compute(source, w, convolution, plan),
                **{"bias": None, "residual": None, **dict(zip(given, terms, strict=True))},
                activation=activation,
                out_dtype=out_dtype,
                channel_axis=layout.index("C"),
            )

        axes = conv2d_kernels.named_axes(
            convolution, direction, biased=bias is not None, added=residual is not None
        )
        return typed(whole, [source, w, *given.values()], *axes, sizes={"g": convolution.groups})
    return conv2d_kernels.convolve(
        source, w, bias=bias, residual=residual, activation=activation, out_dtype=out_dtype,
        convolution=convolution, direction=direction, algorithm=algorithm, blocks=blocks,
        backend=backend, call=call,
    )  # fmt: skip


def _call(
    images: int, convolution: Convolution, dtype: DTypeLike, out_dtype: DTypeLike, *, bias: bool,
    residual: bool, activation: Activation | None,
) -> calls.Conv2d:  # fmt: skip
    """The call of `conv2d` that the tuner is asked about."""
    rows, columns, layout = convolution.rows, convolution.columns, convolution.layout
    size = {"N": images, "H": rows.extent, "W": columns.extent, "C": convolution.c_in}
    n, h, w, c = (size[axis] for axis in layout)
    return calls.Conv2d(
        (n, h, w, c),
        (rows.taps, columns.taps, convolution.c_in // convolution.groups, convolution.c_out),
        strides=(rows.stride, columns.stride),
        padding=((rows.before, rows.after), (columns.before, columns.after)),
        dilation=(rows.dilation, columns.dilation),
        groups=convolution.groups,
        layout=layout,
        bias=bias,
        residual=residual,
        activation=activation,
        out_dtype=jnp.dtype(out_dtype).name,
        dtype=jnp.dtype(dtype).name,
    )


def _taps(w: Array) -> Pair:
    kh, kw, _, _ = w.shape
    return kh, kw


def _check_name(parameter: str, name: str | None, names: tuple[str | None, ...]) -> None:
    if name not in names:
        raise ValueError(f"{parameter}={name!r} must be one of {', '.join(map(repr, names))}")


def _check_operands(name: str, images: Array, w: Array, layout: str, algorithm: str | None) -> None:
    epilogue.check_floating(**{name: images, "w": w})
    _check_name("layout", layout, get_args(Layout))
    _check_name("algorithm", algorithm, (None, *get_args(Algorithm)))
    if images.ndim != 4 or w.ndim != 4:
        raise ValueError(
            f"{name} of shape {images.shape} and w of shape {w.shape} must have four axes"
        )


def _check_channels(name: str, channels: int, kernel: tuple[int, ...], groups: int) -> None:
    """Checks the channels of the images that are given, c_in of x or c_out of y, with w's."""
    _, _, c_in_per_group, c_out = kernel
    try:
        index(groups)
    except TypeError:
        raise TypeError(f"groups={groups!r} must be a whole number") from None
    for each, count in ((name, channels), ("c_out", c_out)):
        if groups < 1 or count % groups:
            raise ValueError(f"groups={groups} must divide {each}={count}")
    if name == "c_in" and c_in_per_group * groups != channels:
        raise ValueError(
            f"w of shape {kernel} must have c_in / groups = {channels // groups} input channels"
        )
    if name == "c_out" and c_out != channels:
        raise ValueError(f"w of shape {kernel} must have y's {channels} output channels")
