"""Weights from a file, as a model's variables."""

from pathlib import Path
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from convjax.models.network import Network, check_key
from convjax.models.vit import ViT
from convjax.weights import big_vision, vit_names
from convjax.weights.entries import check, flat, flat_shapes, from_file
from convjax.weights.files import read_file
from convjax.weights.images import (
    add_token_position,
    fit_positions,
    images_of_file,
    usual_images,
)
from convjax.weights.orbax_folder import read_folder
from convjax.weights.tables import Format, make_table


def load_weights(
    model: Network,
    path: str | Path,
    *,
    source: Format,
    head: Literal["file", "new"] = "file",
    key: jax.Array | None = None,
    image_size: int | tuple[int, int] | None = None,
) -> PyTree[jax.Array]:
    """The model's variables, float32, with the weights in a file.

        variables = load_weights(create_model("resnet50"), "resnet50.pth", source="torchvision")

    No pickle is executed. Each tensor of the file must have its place and each place its tensor.

    What a file does not say is the model's to be: big_vision's vision transformers compute the
    tanh form of GELU (`activation="gelu_tanh"`), torch's the exact one, and another is an error;
    torchvision's GoogLeNet is `googlenet_torchvision`, whose published weights expect the images as
    `transform_input` makes them: from torch's normalisation to values in [-1, 1]. Auxiliary heads
    that the model was made without are not read.

    Args:
      model: made by `create_model`.
      path: `.safetensors`, `.pth` or `.npz`; for "convjax" also a folder of Orbax's.
      source: whose names and layouts the file has.
      head: "new" reads all but the classifiers, and draws them from `key`: for another number of
        classes than the file has. Of a model without one, the file's is left out.
      key: of the new classifiers.
      image_size: side of the model's images in pixels, or (height, width); a ViT's learned
        positions are resized to it. None is what the file's own shapes say.

    Raises:
      ValueError: a damaged file, so far as its format can tell, or one that does not fit; the
        message names every tensor that is missing, unexpected or of the wrong shape. Or the source
        has no such network.
      OSError: the file cannot be opened.
    """
    _check_arguments(source, head, key)
    _check_activation(model, source)
    size = _size(image_size)
    tensors = _read(Path(path), source)
    images = usual_images(model, size)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    table = make_table(flat_shapes(variables), source, model)
    if source in ("timm", "big_vision"):
        add_token_position(tensors, table)
    fitting = images_of_file(model, table, tensors, size)
    if fitting.shape != images.shape:
        images = fitting
        variables = jax.eval_shape(model.init, jax.random.key(0), images)
        table = make_table(flat_shapes(variables), source, model)
    if size is not None:
        fit_positions(tensors, table, model, size)
    table = table.without_heads() if head == "new" else table
    check(table, tensors, path)
    arrays = {path: jnp.asarray(array) for path, array in from_file(table, tensors).items()}
    if head == "new":
        arrays = flat(model.init_parts(key, images, table.heads)) | arrays
    leaves = [arrays[each] for each in flat_shapes(variables)]
    return jax.tree.unflatten(jax.tree.structure(variables), leaves)


def _check_arguments(source: str, head: str, key: jax.Array | None) -> None:
    if source not in get_args(Format):
        raise ValueError(f"source={source!r} must be one of {', '.join(get_args(Format))}")
    if head not in ("file", "new"):
        raise ValueError(f"head={head!r} must be 'file' or 'new'")
    if head == "new" and key is None:
        raise ValueError("head='new' needs a key")
    if key is not None:
        check_key(key)


def _check_activation(model: Network, source: str) -> None:
    """Of what no shape shows: which GELU the weights were trained with."""
    if not isinstance(model, ViT) or source == "convjax":
        return
    theirs = "gelu_tanh" if source == "big_vision" else "gelu"
    if model.activation != theirs:
        raise ValueError(
            f"activation={model.activation!r}: {source}'s weights were trained with {theirs!r}; "
            f"to compute otherwise, read them into model.clone(activation={theirs!r})"
        )


def _size(image_size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    if image_size is None:
        return None
    size = (image_size, image_size) if isinstance(image_size, int | np.integer) else image_size
    if min(size) < 1:
        raise ValueError(f"image_size={image_size} must be at least 1")
    return size


def _read(path: Path, source: Format) -> dict[str, np.ndarray]:
    """A file's tensors under the names that the tables know."""
    if source == "convjax" and path.suffix != ".safetensors":
        return read_folder(path)
    tensors = read_file(path)
    if source == "big_vision":
        return big_vision.as_today(tensors)
    return vit_names.as_today(tensors) if source == "torchvision" else tensors
