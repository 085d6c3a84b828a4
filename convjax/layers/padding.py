"""Zeros around an image, in the forms that models write them."""

import pallas_kernels

Padding = int | pallas_kernels.Padding
"""The same number of pixels on every side, ((top, bottom), (left, right)), "SAME" or "VALID".

`"SAME"` is XLA's: with stride 2 it may pad right and bottom only, where torch pads both sides. The
models of this library therefore write numbers.
"""


def explicit(padding: Padding) -> pallas_kernels.Padding:
    """The same padding as `pallas_kernels` takes it."""
    return ((padding, padding), (padding, padding)) if isinstance(padding, int) else padding
