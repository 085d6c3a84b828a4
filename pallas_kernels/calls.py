"""Calls of the operations as values: an operation, the shapes of its arrays, its other arguments.

    call = Conv2d((256, 56, 56, 64), (3, 3, 64, 64))
    y = jax.eval_shape(call.function(), **call.operands())

The inspector, the tuner and benchmarks ask their questions about these. Each has the passes that it
is asked about: a product has a gradient for each operand, and they are different computations; of
the other operations the backward pass is one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import pallas_kernels
from pallas_kernels import windows
from pallas_kernels.conv2d_algorithms import Layout
from pallas_kernels.epilogue import Activation
from pallas_kernels.float8 import ScaleState
from pallas_kernels.windows import Padding, Pair, Windows

Pass = Literal["forward", "input_gradient", "kernel_gradient", "backward"]
"""The gradients are those of the first operand, x or a, and of the second, w or b; `backward` is
the gradient of all operands."""

Shape = tuple[int, int, int, int]


class Work(NamedTuple):
    """What a pass must do at least."""

    flops: int
    bytes_moved: int
    """Every array that it reads or writes, once."""


@dataclass(frozen=True, kw_only=True)
class _Call:
    """What all calls have."""

    operation: ClassVar[str]
    """The function's name in `pallas_kernels`."""
    passes: ClassVar[tuple[Pass, ...]] = ("forward", "backward")
    is_product: ClassVar[bool] = False
    """Whether its arithmetic is matrix products, which Tensor Cores make."""

    dtype: str = "bfloat16"

    def options(self) -> dict[str, Any]:
        """The arguments of the operation that are no arrays."""
        return {}

    def operands(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Abstract arrays by the name of the argument; a parameter that is not the kernel of a
        product is float32."""
        raise NotImplementedError

    def function(self, **options: Any) -> Callable[..., jax.Array]:
        """The operation with all arguments but the arrays; `options` are more of them."""
        return partial(getattr(pallas_kernels, self.operation), **self.options(), **options)

    def differentiated(self, which: Pass) -> tuple[str, ...]:
        """The operands whose gradient a pass is."""
        operands = self.operands()
        floating = [name for name, x in operands.items() if jnp.issubdtype(x.dtype, jnp.floating)]
        if which == "forward":
            return ()
        if which == "backward":
            return tuple(floating)
        return (floating[which == "kernel_gradient"],)

    def work(self, which: Pass = "forward") -> Work:
        """FLOPs and bytes of a pass."""
        raise NotImplementedError


@dataclass(frozen=True)
class Conv2d(_Call):
    """A call of `conv2d` on arrays of these shapes: x in `layout`, w as HWIO."""

    operation: ClassVar[str] = "conv2d"
    passes: ClassVar[tuple[Pass, ...]] = ("forward", "input_gradient", "kernel_gradient")
    is_product: ClassVar[bool] = True

    x: Shape
    w: Shape
    strides: Pair = (1, 1)
    padding: Padding = "SAME"
    dilation: Pair = (1, 1)
    groups: int = 1
    layout: Layout = "NHWC"
    bias: bool = False
    residual: bool = False
    activation: Activation | None = None
    out_dtype: str | None = None
    """Of y; by default `dtype`."""

    @property
    def batch(self) -> int:
        return self.x[self.layout.index("N")]

    @property
    def y(self) -> Shape:
        """The output's shape, in `layout`.

        Raises:
          ValueError: no window fits the padded image, or a size, stride or dilation is below 1.
        """
        rows, columns = self.windows
        size = {"N": self.batch, "H": rows.count, "W": columns.count, "C": self.w[3]}
        n, h, w, c = (size[axis] for axis in self.layout)
        return n, h, w, c

    @property
    def windows(self) -> tuple[Windows, Windows]:
        """Where the taps fall, (down, across); errors as in `y`."""
        return windows.resolve(
            (self.x[self.layout.index("H")], self.x[self.layout.index("W")]),
            self.w[:2],
            strides=self.strides,
            padding=self.padding,
            dilation=self.dilation,
        )

    @property
    def macs(self) -> int:
        """Multiply-adds of the batch: those of the output, and of either gradient."""
        return prod(self.y) * prod(self.w[:3])

    def work(self, which: Pass = "forward") -> Work:
        """Of x, w and y, each moved once: the same in any of the three passes."""
        operands, y = (self.x, self.w), _bytes(self.out_dtype or self.dtype, self.y)
        return Work(2 * self.macs, _bytes(self.dtype, *operands) + y)

    def options(self) -> dict[str, Any]:
        return {
            "strides": self.strides,
            "padding": self.padding,
            "dilation": self.dilation,
            "groups": self.groups,
            "layout": self.layout,
            "activation": self.activation,
            "out_dtype": self.out_dtype,
        }

    def operands(self) -> dict[str, jax.ShapeDtypeStruct]:
        given: dict[str, tuple[tuple[int, ...], DTypeLike]] = {
            "x": (self.x, self.dtype),
            "w": (self.w, self.dtype),
        }
        if self.bias:
            given["bias"] = (self.w[3:], jnp.float32)
        if self.residual:
            given["residual"] = (self.y, self.dtype)
        return _abstract(given)


@dataclass(frozen=True)
class Conv2dTranspose(_Call):
    """A call of `conv2d_transpose` on arrays of these shapes: y in `layout`, w as HWIO."""

    operation: ClassVar[str] = "conv2d_transpose"
    passes: ClassVar[tuple[Pass, ...]] = Conv2d.passes
    is_product: ClassVar[bool] = True

    y: Shape
    w: Shape
    strides: Pair = (1, 1)
    padding: Padding = "SAME"
    dilation: Pair = (1, 1)
    groups: int = 1
    layout: Layout = "NHWC"
    bias: bool = False
    residual: bool = False
    activation: Activation | None = None
    size: Pair | None = None
    """(height, width) of the result; by default the smallest, as of `conv2d_transpose`."""

    @property
    def batch(self) -> int:
        return self.y[self.layout.index("N")]

    @property
    def adjoint(self) -> Conv2d:
        """The convolution whose gradient of x this is.

        Raises:
          ValueError: a size, stride or dilation is below 1, or the padding takes all pixels away.
        """
        counts = self.y[self.layout.index("H")], self.y[self.layout.index("W")]
        height, width = self.size or windows.smallest(
            counts, self.w[:2], self.strides, self.padding, self.dilation
        )
        channels = self.w[2] * self.groups
        size = {"N": self.batch, "H": height, "W": width, "C": channels}
        n, h, w, c = (size[axis] for axis in self.layout)
        return Conv2d(
            (n, h, w, c), self.w, self.strides, self.padding, self.dilation, self.groups,
            self.layout, dtype=self.dtype,
        )  # fmt: skip

    def work(self, which: Pass = "forward") -> Work:
        """That of the convolution."""
        return self.adjoint.work(which)

    def options(self) -> dict[str, Any]:
        return {
            "strides": self.strides,
            "padding": self.padding,
            "dilation": self.dilation,
            "groups": self.groups,
            "layout": self.layout,
            "activation": self.activation,
            "size": self.size,
        }

    def operands(self) -> dict[str, jax.ShapeDtypeStruct]:
        given: dict[str, tuple[tuple[int, ...], DTypeLike]] = {
            "y": (self.y, self.dtype),
            "w": (self.w, self.dtype),
        }
        if self.bias:
            given["bias"] = ((self.w[2] * self.groups,), jnp.float32)
        if self.residual:
            given["residual"] = (self.adjoint.x, self.dtype)
        return _abstract(given)


@dataclass(frozen=True)
class Matmul(_Call):
    """A call of `matmul` on arrays of these shapes: a [*batch, m, k] and b [(*batch,) k, n]."""

    operation: ClassVar[str] = "matmul"
    passes: ClassVar[tuple[Pass, ...]] = ("forward", "input_gradient", "kernel_gradient")
    is_product: ClassVar[bool] = True

    a: tuple[int, ...]
    b: tuple[int, ...]
    bias: bool = False
    residual: bool = False
    activation: Activation | None = None
    out_dtype: str | None = None
    """Of the product; by default `dtype`."""

    @property
    def batch(self) -> int:
        return self.a[0]

    @property
    def y(self) -> tuple[int, ...]:
        """The product's shape."""
        return (*self.a[:-1], self.b[-1])

    @property
    def macs(self) -> int:
        """Multiply-adds: those of the product, and of either gradient."""
        return prod(self.y) * self.a[-1]

    def work(self, which: Pass = "forward") -> Work:
        """Of a, b and y, each moved once: the same in any of the three passes."""
        operands, y = (self.a, self.b), _bytes(self.out_dtype or self.dtype, self.y)
        return Work(2 * self.macs, _bytes(self.dtype, *operands) + y)

    def options(self) -> dict[str, Any]:
        return {"activation": self.activation, "out_dtype": self.out_dtype}

    def operands(self) -> dict[str, jax.ShapeDtypeStruct]:
        given: dict[str, tuple[tuple[int, ...], DTypeLike]] = {
            "a": (self.a, self.dtype),
            "b": (self.b, self.dtype),
        }
        if self.bias:
            given["bias"] = (self.b[-1:], jnp.float32)
        if self.residual:
            given["residual"] = (self.y, self.dtype)
        return _abstract(given)


@dataclass(frozen=True)
class MatmulFp8(_Call):
    """A call of `matmul_fp8` on arrays of these shapes: a [*batch, m, k] and b [k, n].

    The scales are those before the first step.
    """

    operation: ClassVar[str] = "matmul_fp8"
    passes: ClassVar[tuple[Pass, ...]] = Matmul.passes
    is_product: ClassVar[bool] = True

    a: tuple[int, ...]
    b: tuple[int, ...]
    bias: bool = False
    activation: Activation | None = None

    @property
    def batch(self) -> int:
        return self.a[0]

    @property
    def y(self) -> tuple[int, ...]:
        """The product's shape."""
        return (*self.a[:-1], self.b[-1])

    def work(self, which: Pass = "forward") -> Work:
        """Of a, b and y, each moved once, two of them a byte a number."""
        wide = {"forward": self.y, "input_gradient": self.a}.get(which, self.b)
        flops = 2 * prod(self.y) * self.a[-1]
        numbers = sum(map(prod, (self.a, self.b, self.y)))
        return Work(flops, numbers - prod(wide) + _bytes(self.dtype, wide))

    def options(self) -> dict[str, Any]:
        return {"activation": self.activation}

    def function(self, **options: Any) -> Callable[..., jax.Array]:
        """As of all calls; the state of the scales is no operand."""
        product = super().function(**options)
        return lambda **arrays: product(state=ScaleState.create(), **arrays)

    def operands(self) -> dict[str, jax.ShapeDtypeStruct]:
        given: dict[str, tuple[tuple[int, ...], DTypeLike]] = {
            "a": (self.a, self.dtype),
            "b": (self.b, self.dtype),
        }
        if self.bias:
            given["bias"] = (self.b[-1:], jnp.float32)
        return _abstract(given)


@dataclass(frozen=True)
class Attention(_Call):
    """A call of `attention` on q [b, t, h, d] and k, v [b, s, h, d]; by default s is t."""

    operation: ClassVar[str] = "attention"
    is_product: ClassVar[bool] = True

    q: tuple[int, ...]
    s: int | None = None
    causal: bool = False

    @property
    def batch(self) -> int:
        return self.q[0]

    @property
    def y(self) -> tuple[int, ...]:
        """The result's shape."""
        return self.q

    @property
    def k(self) -> tuple[int, ...]:
        """The shape of k and of v."""
        b, t, h, d = self.q
        return (b, t if self.s is None else self.s, h, d)

    def work(self, which: Pass = "forward") -> Work:
        """Two products forward, five backward, of which a causal one needs half."""
        b, t, h, d = self.q
        products, passes = (2, 1) if which == "forward" else (5, 2)
        flops = products * 2 * b * h * t * self.k[1] * d // (2 if self.causal else 1)
        return Work(flops, passes * _bytes(self.dtype, self.q, self.k, self.k, self.q))

    def options(self) -> dict[str, Any]:
        return {"causal": self.causal}

    def operands(self) -> dict[str, jax.ShapeDtypeStruct]:
        shapes = {"q": self.q, "k": self.k, "v": self.k}
        return _abstract({name: (shape, self.dtype) for name, shape in shapes.items()})


@dataclass(frozen=True)
class LayerNorm(_Call):
    """A call of `layer_norm` on x [..., d]."""

    operation: ClassVar[str] = "layer_norm"

    x: tuple[int, ...]

    @property
    def batch(self) -> int:
        return self.x[0]

    @property
    def y(self) -> tuple[int, ...]:
        """The result's shape."""
        return self.x

    def work(self, which: Pass = "forward") -> Work:
        """x read and y written; backward x and dy read, dx written."""
        each, arrays = (8, 2) if which == "forward" else (14, 3)
        return Work(each * prod(self.x), _bytes(self.dtype, *[self.x] * arrays))

    def operands(self) -> dict[str, jax.ShapeDtypeStruct]:
        d = self.x[-1:]
        return _abstract(
            {"x": (self.x, self.dtype), "scale": (d, jnp.float32), "bias": (d, jnp.float32)}
        )


@dataclass(frozen=True)
class LocalResponseNorm(_Call):
    """A call of `local_response_norm` on x, in `layout`."""

    operation: ClassVar[str] = "local_response_norm"

    x: tuple[int, ...]
    size: int = 5
    groups: int = 1
    layout: Layout = "NHWC"

    @property
    def batch(self) -> int:
        return self.x[self.layout.index("N")]

    @property
    def y(self) -> tuple[int, ...]:
        """The result's shape."""
        return self.x

    def work(self, which: Pass = "forward") -> Work:
        """x read and y written; backward x and dy read, dx written."""
        each, arrays = (self.size + 6, 2) if which == "forward" else (2 * self.size + 14, 3)
        return Work(each * prod(self.x), _bytes(self.dtype, *[self.x] * arrays))

    def options(self) -> dict[str, Any]:
        return {"size": self.size, "groups": self.groups, "layout": self.layout}

    def operands(self) -> dict[str, jax.ShapeDtypeStruct]:
        return _abstract({"x": (self.x, self.dtype)})


@dataclass(frozen=True)
class MaxPool(_Call):
    """A call of `max_pool` on x, in `layout`."""

    operation: ClassVar[str] = "max_pool"

    x: tuple[int, ...]
    window: Pair = (3, 3)
    strides: Pair = (2, 2)
    padding: Padding = "VALID"
    layout: Layout = "NHWC"

    @property
    def batch(self) -> int:
        return self.x[self.layout.index("N")]

    @property
    def y(self) -> tuple[int, ...]:
        """The result's shape."""
        rows, columns = self.windows
        size = dict(zip(self.layout, self.x, strict=True))
        size |= {"H": rows.count, "W": columns.count}
        n, h, w, c = (size[axis] for axis in self.layout)
        return n, h, w, c

    @property
    def windows(self) -> tuple[Windows, Windows]:
        """Where the windows' pixels are, (down, across).

        Raises:
          ValueError: no window fits the padded image, or a size or a stride is below 1.
        """
        return windows.resolve(
            (self.x[self.layout.index("H")], self.x[self.layout.index("W")]),
            self.window,
            strides=self.strides,
            padding=self.padding,
        )

    def work(self, which: Pass = "forward") -> Work:
        """A comparison a tap; x read, y and a byte for each window written, and the reverse."""
        flops = prod(self.y) * prod(self.window)
        return Work(flops, _bytes(self.dtype, self.x, self.y) + prod(self.y))

    def options(self) -> dict[str, Any]:
        return {
            "window": self.window,
            "strides": self.strides,
            "padding": self.padding,
            "layout": self.layout,
        }

    def operands(self) -> dict[str, jax.ShapeDtypeStruct]:
        return _abstract({"x": (self.x, self.dtype)})


@dataclass(frozen=True)
class CrossEntropy(_Call):
    """A call of `cross_entropy` on logits [*batch, n]."""

    operation: ClassVar[str] = "cross_entropy"

    logits: tuple[int, ...]
    label_smoothing: float = 0.0

    @property
    def batch(self) -> int:
        return self.logits[0]

    @property
    def y(self) -> tuple[int, ...]:
        """The losses' shape."""
        return self.logits[:-1]

    def work(self, which: Pass = "forward") -> Work:
        """The logits read; backward read again, and their gradient written."""
        each, arrays = (5, 1) if which == "forward" else (5, 2)
        return Work(each * prod(self.logits), _bytes(self.dtype, *[self.logits] * arrays))

    def options(self) -> dict[str, Any]:
        return {"label_smoothing": self.label_smoothing}

    def operands(self) -> dict[str, jax.ShapeDtypeStruct]:
        return _abstract(
            {"logits": (self.logits, self.dtype), "labels": (self.logits[:-1], jnp.int32)}
        )


Call = (
    Conv2d
    | Conv2dTranspose
    | Matmul
    | MatmulFp8
    | Attention
    | LayerNorm
    | LocalResponseNorm
    | MaxPool
    | CrossEntropy
)


def _bytes(dtype: str, *shapes: tuple[int, ...]) -> int:
    return sum(map(prod, shapes)) * jnp.dtype(dtype).itemsize


def _abstract(given: dict[str, tuple[tuple[int, ...], DTypeLike]]) -> dict[str, Any]:
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in given.items()}
