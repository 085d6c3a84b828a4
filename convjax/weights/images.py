"""Which images the network in a file sees: a model's shapes may depend on them."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from convjax.layers import resize_positions
from convjax.models.alexnet import AlexNet
from convjax.models.vit import ViT
from convjax.models.zfnet import ZFNet
from convjax.weights.entries import Entry, Shape, Table

_POSITIONS = "params/position_embedding"
_CLASS_TOKEN = "params/class_token"
_FC6 = "params/fc6/kernel"
_STEMS = tuple(
    f"params/{layer}/kernel" for layer in ("patch_embedding", "conv1_1", "conv1/conv", "conv1")
)
_USUAL_SIDE = 224


def usual_images(model: nn.Module, size: tuple[int, int] | None = None) -> jax.ShapeDtypeStruct:
    """Images that the model takes: coloured, of the size, or of one that fits it."""
    side = model.patch_size if isinstance(model, ViT) else _USUAL_SIDE
    return _images(size or (side, side), 3)


def images_of_file(
    model: nn.Module,
    table: Table,
    tensors: Mapping[str, np.ndarray],
    size: tuple[int, int] | None,
) -> jax.ShapeDtypeStruct:
    """The images for which the model has the file's shapes, as far as these say.

    Args:
      model: the network.
      table: its entries for the usual images; the names do not depend on them.
      tensors: the file's, by those names.
      size: known sides; else they follow from a ViT's positions, or from what AlexNet's fc6 reads.
    """
    side = usual_images(model).shape[1]
    entries = {entry.path: entry for entry in reversed(table.entries)}
    stems = [entries[path] for path in _STEMS if path in entries]
    channels = _shape_for_us(stems[0], tensors, (1, 1, 3, 1))[2] if stems else 3
    if isinstance(model, ViT) and _POSITIONS in entries:
        tokens = _shape_for_us(entries[_POSITIONS], tensors, (1, 1, 1))[1]
        side *= max(math.isqrt(max(tokens - (_CLASS_TOKEN in entries), 0)), 1)
    elif isinstance(model, AlexNet | ZFNet):
        maps, known = model.widths[-1], table.shapes[_FC6]
        there = _shape_for_us(entries[_FC6], tensors, known)[0]
        grown = max(math.isqrt(there // maps), 1) - math.isqrt(known[0] // maps)
        side += grown * _strides(model)
    return _images(size or (side, side), channels)


def add_token_position(tensors: dict[str, np.ndarray], table: Table) -> None:
    """Give the class token a position of 0, if the model has a token and the file no row for it.

    There positions were added before the token was put in front (big_vision, DeiT III). A square
    number of rows is taken for patches alone, where one less is no square.
    """
    names = {entry.path: entry.name for entry in table.entries}
    positions = tensors.get(names.get(_POSITIONS, ""))
    if _CLASS_TOKEN not in names or positions is None or positions.ndim != 3:
        return
    count = positions.shape[1]
    if _is_square(count) and not _is_square(count - 1):
        rows = [np.zeros_like(positions[:, :1]), positions]
        tensors[names[_POSITIONS]] = np.concatenate(rows, axis=1)


def fit_positions(
    tensors: dict[str, np.ndarray], table: Table, model: nn.Module, size: tuple[int, int]
) -> None:
    """Resize the file's positions to images of another size, if it has a ViT's that differ."""
    names = {entry.path: entry.name for entry in table.entries}
    positions = tensors.get(names.get(_POSITIONS, ""))
    if not isinstance(model, ViT) or positions is None or positions.ndim != 3:
        return
    grid, with_token = (
        (size[0] // model.patch_size, size[1] // model.patch_size),
        model.pool == "token",
    )
    if positions.shape[1] != grid[0] * grid[1] + with_token:
        whole = jnp.asarray(positions, jnp.float32)
        resized = resize_positions(whole, grid, class_token=with_token)
        tensors[names[_POSITIONS]] = np.asarray(resized)


def _images(size: tuple[int, int], channels: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, *size, channels), jnp.float32)


def _shape_for_us(entry: Entry, tensors: Mapping[str, np.ndarray], otherwise: Shape) -> Shape:
    """The shape of a tensor in our order of axes; another if it is missing or of another rank."""
    tensor = tensors.get(entry.name)
    if tensor is None or tensor.ndim != len(entry.layout.shape):
        return otherwise
    return entry.layout.theirs(tensor).shape


def _strides(model: AlexNet | ZFNet) -> int:
    """Pixels of the image for one of what fc6 reads: of the convolutions and three poolings."""
    convolutions = model.stem_strides * (model.conv2_strides if isinstance(model, ZFNet) else 1)
    return convolutions * 2**3


def _is_square(number: int) -> bool:
    return number > 0 and math.isqrt(number) ** 2 == number
