"""Convolutions to draw, and in float64 as loops over the taps of their kernel."""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from pallas_kernels import conv2d, conv2d_transpose


@dataclass(frozen=True)
class Case:
    x_shape: tuple[int, ...]  # NHWC
    w_shape: tuple[int, ...]
    strides: tuple[int, int] = (1, 1)
    padding: str | tuple[tuple[int, int], tuple[int, int]] = "SAME"
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def options(self):
        names = ("strides", "padding", "dilation", "groups")
        return {name: getattr(self, name) for name in names}

    @property
    def edges(self):
        """((top, bottom), (left, right))."""
        if self.padding == "VALID":
            return (0, 0), (0, 0)
        if self.padding != "SAME":
            return self.padding
        edges = []
        for axis in (0, 1):
            n, stride = self.x_shape[1 + axis], self.strides[axis]
            span = (self.w_shape[axis] - 1) * self.dilation[axis] + 1
            missing = max(span - stride if n % stride == 0 else span - n % stride, 0)
            edges.append((missing // 2, missing - missing // 2))
        return tuple(edges)

    @property
    def y_shape(self):
        sizes = [
            (n + sum(edges) - (taps - 1) * dilation - 1) // stride + 1
            for n, edges, taps, dilation, stride in zip(
                self.x_shape[1:3], self.edges, self.w_shape, self.dilation, self.strides,
                strict=False,
            )
        ]  # fmt: skip
        return (self.x_shape[0], *sizes, self.w_shape[3])

    def taps(self):
        """(i, j) of every tap, and what all output pixels see under it of the padded image."""
        for i, j in np.ndindex(self.w_shape[:2]):
            yield (i, j), (slice(None), *(
                slice(tap * dilation, tap * dilation + (count - 1) * stride + 1, stride)
                for tap, dilation, count, stride in zip(
                    (i, j), self.dilation, self.y_shape[1:3], self.strides, strict=True
                )
            ))  # fmt: skip

    def padded(self, x):
        return np.pad(x, ((0, 0), *self.edges, (0, 0)))

    def by_group(self, images):
        *sizes, channels = images.shape
        return images.reshape(*sizes, self.groups, channels // self.groups)


def convolve(case, x, w):
    """y = x * w."""
    padded, w = case.by_group(case.padded(x)), case.by_group(w)
    y = np.zeros((*case.y_shape[:3], case.groups, w.shape[-1]))
    for tap, seen in case.taps():
        y += np.einsum("bpqgc,cgo->bpqgo", padded[seen], w[tap])
    return y.reshape(case.y_shape)


def input_gradient(case, dy, w):
    """The gradient of x from that of y: the transpose of `convolve` in x."""
    dy, w = case.by_group(dy), case.by_group(w)
    padded = case.by_group(case.padded(np.zeros(case.x_shape)))
    for tap, seen in case.taps():
        padded[seen] += np.einsum("bpqgo,cgo->bpqgc", dy, w[tap])
    (top, _), (left, _) = case.edges
    h, width = case.x_shape[1:3]
    return padded[:, top : top + h, left : left + width].reshape(case.x_shape)


def kernel_gradient(case, x, dy):
    """The gradient of w from that of y."""
    padded, dy = case.by_group(case.padded(x)), case.by_group(dy)
    dw = case.by_group(np.zeros(case.w_shape))
    for tap, seen in case.taps():
        dw[tap] = np.einsum("bpqgc,bpqgo->cgo", padded[seen], dy)
    return dw.reshape(case.w_shape)


SOME_IMAGES = st.integers(1, 3)
SOME_GROUPS = st.sampled_from([1, 1, 1, 2, 3, 8, 32])


@st.composite
def cases(draw, *, images=SOME_IMAGES, groups=SOME_GROUPS):
    pair = lambda low, high: st.tuples(*[st.integers(low, high)] * 2)  # noqa: E731
    image, kernel, strides = draw(pair(1, 12)), draw(pair(1, 5)), draw(pair(1, 4))
    dilation = draw(st.just((1, 1)) | pair(1, 3))
    if draw(st.integers(0, 5)) == 0:  # patches
        strides, dilation = kernel, (1, 1)
    span = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    fits = all(n >= s for n, s in zip(image, span, strict=True))
    # Explicit padding makes every window fit, and is asymmetric more often than not.
    low = draw(pair(0, 3))
    high = [
        draw(st.integers(max(0, s - n - before), max(0, s - n - before) + 2))
        for s, n, before in zip(span, image, low, strict=True)
    ]
    explicit = tuple(zip(low, high, strict=True))
    padding = draw(st.sampled_from(["SAME", *(["VALID"] if fits else []), explicit, explicit]))
    groups = draw(groups)
    most = 40 // groups
    # 16 and 32 channels fill a tile.
    sizes = st.sampled_from([n for n in (1, 3, 16, 32) if n <= most]) | st.integers(1, most)
    c_in, c_out = draw(sizes), draw(sizes)
    return Case(
        x_shape=(draw(images), *image, groups * c_in),
        w_shape=(*kernel, c_in, groups * c_out),
        strides=strides,
        padding=padding,
        dilation=dilation,
        groups=groups,
    )


def to_layout(images, layout):
    """From NHWC."""
    return images.transpose(["NHWC".index(axis) for axis in layout])


def to_nhwc(images, layout):
    return images.transpose([layout.index(axis) for axis in "NHWC"])


def in_nhwc(operation, case, *, layout="NHWC", **fixed):
    """`operation` on a case in `layout`, from NHWC to NHWC."""

    def call(images, w, *, residual=None, **options):
        if residual is not None:
            options["residual"] = to_layout(residual, layout)
        y = operation(
            to_layout(images, layout), w, layout=layout, **case.options, **fixed, **options
        )
        return to_nhwc(y, layout)

    return call


def forward(case, **options):
    """`conv2d` of a case, and its reference: the arguments of `assert_agrees`."""

    def reference(x, w):
        return convolve(case, x, w), lambda dy: (
            input_gradient(case, dy, w),
            kernel_gradient(case, x, dy),
        )

    return in_nhwc(conv2d, case, **options), reference, case.x_shape, case.w_shape


def transposed(case, **options):
    """`conv2d_transpose` of a case, from images of y's shape, and its reference."""

    def reference(y, w):
        return input_gradient(case, y, w), lambda dx: (
            convolve(case, dx, w),
            kernel_gradient(case, dx, y),
        )

    operation = in_nhwc(conv2d_transpose, case, size=case.x_shape[1:3], **options)
    return operation, reference, case.y_shape, case.w_shape
