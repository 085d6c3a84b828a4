"""The smallest image of which a network's layers leave something."""

from dataclasses import dataclass

from jaxtyping import Array, Float


@dataclass(frozen=True)
class Window:
    """A convolution or pooling along one axis; `padding` is that of both sides together."""

    taps: int
    stride: int = 1
    padding: int = 0
    ceil_mode: bool = False


def check_size(images: Float[Array, "b h w c"], *layers: Window) -> None:
    """Raise a ValueError unless something is left of the images after all of the layers."""
    smallest = 1
    for layer in reversed(layers):
        windows = smallest - 1
        if layer.ceil_mode and windows:  # the last one may hang over all but its first pixel
            smallest = (windows - 1) * layer.stride + layer.taps + 1 - layer.padding
        else:
            smallest = windows * layer.stride + layer.taps - layer.padding
        smallest = max(smallest, 1)
    height, width = images.shape[1:3]
    if min(height, width) < smallest:
        raise ValueError(
            f"images of {height}×{width} pixels are too small: at least {smallest}×{smallest}"
        )
