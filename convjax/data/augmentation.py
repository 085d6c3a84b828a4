"""What happens to an image between its source and the network.

Images stay `uint8` on the host: a batch crosses to the device at a quarter of its float32 size, and
`normalise` turns it into floats there, under jit. Each transform is a pure function of an image
`[h, w, c]` and, where it is random, of a `numpy.random.Generator`; `Augmentation` composes them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8
from PIL import Image

_CROP_ATTEMPTS = 10


def resize(image: UInt8[np.ndarray, "h w c"], size: tuple[int, int]) -> UInt8[np.ndarray, "H W c"]:
    """Resize to `size` (height, width) bilinearly, with antialiasing where it shrinks."""
    height, width = size
    if image.shape[:2] == size:
        return image
    # Pillow has no one-channel axis; its other two-to-four-channel modes blend by alpha.
    if image.shape[2] not in (1, 3):
        raise ValueError(f"an image of {image.shape[2]} channels: resizing takes 1 or 3")
    pixels = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
    resized = np.asarray(pixels.resize((width, height), Image.Resampling.BILINEAR))
    return resized.reshape(height, width, image.shape[2])


def resize_short_side(image: UInt8[np.ndarray, "h w c"], side: int) -> UInt8[np.ndarray, "H W c"]:
    """Resize so that the shorter side is `side`; the longer one keeps the aspect, rounded down."""
    height, width = image.shape[:2]
    shorter = min(height, width)
    return resize(image, (side * height // shorter, side * width // shorter))


def centre_crop(image: UInt8[np.ndarray, "h w c"], side: int) -> UInt8[np.ndarray, "side side c"]:
    """Cut out the central square (the upper left one of the four where the centre is ambiguous)."""
    _check_fits(image, side)
    height, width = image.shape[:2]
    return _cut(image, (height - side) // 2, (width - side) // 2, (side, side))


def random_crop(
    image: UInt8[np.ndarray, "h w c"], side: int, rng: np.random.Generator
) -> UInt8[np.ndarray, "side side c"]:
    """Cut out a square, every position equally likely (Krizhevsky et al., 2012, section 4.1)."""
    _check_fits(image, side)
    height, width = image.shape[:2]
    return _cut(image, _below(height - side + 1, rng), _below(width - side + 1, rng), (side, side))


def pad_crop(
    image: UInt8[np.ndarray, "h w c"], rng: np.random.Generator, *, padding: int = 4
) -> UInt8[np.ndarray, "h w c"]:
    """Pad with `padding` zeros on each side, cut the old size out at random (He et al., 2016)."""
    height, width, channels = image.shape
    padded = np.zeros((height + 2 * padding, width + 2 * padding, channels), np.uint8)
    padded[padding : padding + height, padding : padding + width] = image
    return _cut(padded, _below(2 * padding + 1, rng), _below(2 * padding + 1, rng), (height, width))


def random_resized_crop(
    image: UInt8[np.ndarray, "h w c"],
    side: int,
    rng: np.random.Generator,
    *,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> UInt8[np.ndarray, "side side c"]:
    """Cut out a random part and resize it to a square (Szegedy et al., 2014, section 6).

    The part's share of the area is uniform in `scale`, the logarithm of its width over its height
    uniform in `ratio`. After ten draws that do not fit it is the largest central part whose aspect
    is in `ratio`: torchvision's fallback.
    """
    height, width = image.shape[:2]
    for _ in range(_CROP_ATTEMPTS):
        area = height * width * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        part = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < part[0] <= height and 0 < part[1] <= width:
            top, left = _below(height - part[0] + 1, rng), _below(width - part[1] + 1, rng)
            return resize(_cut(image, top, left, part), (side, side))
    aspect = min(max(width / height, ratio[0]), ratio[1])
    part = min(height, round(width / aspect)), min(width, round(height * aspect))
    top, left = (height - part[0]) // 2, (width - part[1]) // 2
    return resize(_cut(image, top, left, part), (side, side))


def horizontal_flip(
    image: UInt8[np.ndarray, "h w c"], rng: np.random.Generator
) -> UInt8[np.ndarray, "h w c"]:
    """Mirror left and right, half of the time."""
    return image[:, ::-1] if rng.random() < 0.5 else image


def normalise(
    images: UInt8[Array, "b h w c"], mean: Sequence[float], std: Sequence[float]
) -> Float[Array, "b h w c"]:
    """Return `(images / 255 - mean) / std` in float32, for use under jit.

    Args:
      images: pixels in 0-255.
      mean: one value a channel, in units of 1 (white is 1).
      std: one value a channel, in the same units.

    Raises:
      ValueError: `mean` or `std` does not have one value a channel.
    """
    channels = images.shape[-1]
    for name, values in (("mean", mean), ("std", std)):
        if len(values) != channels:
            raise ValueError(f"{name}={tuple(values)} must have one value for each of {channels=}")
    shift = jnp.asarray(mean, jnp.float32).reshape(1, 1, 1, channels)
    spread = jnp.asarray(std, jnp.float32).reshape(1, 1, 1, channels)
    return (images.astype(jnp.float32) / 255 - shift) / spread


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """How images are sized, and varied in training; the default leaves them as they are.

    The three usual ones:

        Augmentation(crop_padding=4, flip=True)                             # CIFAR (ResNet)
        Augmentation(resize=256, crop=224, flip=True)                       # AlexNet, VGG
        Augmentation(resize=256, crop=224, resized_crop=True, flip=True)    # GoogLeNet and later

    Attributes:
      resize: pixels of the shorter side after a first resize; None keeps the size.
      crop: side of the square cut out, at random in training, centred in evaluation.
      crop_padding: zeros on each side before a random crop back to the old size, training only.
      resized_crop: in training, `random_resized_crop` to `crop` in place of `resize` and `crop`.
      scale: bounds on the share of the area that a resized crop takes.
      ratio: bounds on the width over the height of a resized crop.
      flip: mirror half of the training images.

    Raises:
      ValueError: a value is out of bounds, or two contradict each other.
    """

    resize: int | None = None
    crop: int | None = None
    crop_padding: int = 0
    resized_crop: bool = False
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = False

    def __post_init__(self) -> None:
        for name in ("resize", "crop"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1 pixel")
        if self.crop_padding < 0:
            raise ValueError(f"crop_padding={self.crop_padding} must not be negative")
        if self.crop is not None and self.resize is not None and self.crop > self.resize:
            raise ValueError(f"crop={self.crop} must fit into resize={self.resize}")
        if self.crop_padding and self.crop is not None:
            raise ValueError(
                f"crop_padding={self.crop_padding} and crop={self.crop} exclude "
                "each other: one cuts back to the old size, one to a new one"
            )
        if self.resized_crop and self.crop is None:
            raise ValueError("resized_crop=True needs crop, the side to resize to")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale={self.scale} must be increasing, in (0, 1]")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"ratio={self.ratio} must be increasing and positive")

    @property
    def fixes_size(self) -> bool:
        """Whether images of any size come out at one."""
        return self.crop is not None

    def randomly(
        self, image: UInt8[np.ndarray, "h w c"], rng: np.random.Generator
    ) -> UInt8[np.ndarray, "H W c"]:
        """Return the image as training sees it, a pure function of the image and `rng`'s state."""
        if self.crop is not None and self.resized_crop:
            image = random_resized_crop(image, self.crop, rng, scale=self.scale, ratio=self.ratio)
        else:
            if self.resize is not None:
                image = resize_short_side(image, self.resize)
            if self.crop is not None:
                image = random_crop(image, self.crop, rng)
            elif self.crop_padding:
                image = pad_crop(image, rng, padding=self.crop_padding)
        return horizontal_flip(image, rng) if self.flip else image

    def centred(self, image: UInt8[np.ndarray, "h w c"]) -> UInt8[np.ndarray, "H W c"]:
        """Return the image as evaluation sees it."""
        if self.resize is not None:
            image = resize_short_side(image, self.resize)
        return image if self.crop is None else centre_crop(image, self.crop)


def _below(bound: int, rng: np.random.Generator) -> int:
    """Draw from 0 to `bound - 1`; a third of the time that `rng.integers` takes."""
    return int(rng.random() * bound)


def _cut(
    image: UInt8[np.ndarray, "h w c"], top: int, left: int, size: tuple[int, int]
) -> UInt8[np.ndarray, "H W c"]:
    return image[top : top + size[0], left : left + size[1]]


def _check_fits(image: UInt8[np.ndarray, "h w c"], side: int) -> None:
    height, width = image.shape[:2]
    if side > min(height, width):
        raise ValueError(f"crop={side} does not fit into an image of {height}x{width}; set resize")
