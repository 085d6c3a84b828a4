"""A model's variables, as a file for this library or for others."""

from pathlib import Path
from typing import get_args

from flax import linen as nn
from jaxtyping import PyTree

from convjax.weights.big_vision import as_first
from convjax.weights.entries import flat, to_file
from convjax.weights.files import write_file
from convjax.weights.orbax_folder import write_folder
from convjax.weights.tables import Format, make_table

_ENDINGS = {
    "torchvision": (".safetensors", ".pth", ".pt"),
    "timm": (".safetensors", ".pth", ".pt"),
    "big_vision": (".npz",),
    "convjax": (".safetensors", ""),
}


def save_weights(
    variables: PyTree, path: str | Path, *, target: Format, model: nn.Module | None = None
) -> None:
    """Write variables as float32 under the names and in the layouts of `target`.

        save_weights(variables, "resnet50.pth", target="torchvision")    # torch.load reads it

    A file that is there is replaced once the new one is whole. Reading it back with `load_weights`
    gives the same variables to the bit.

    Args:
      variables: {"params": …, "batch_stats": …} of a model.
      path: `.safetensors` or `.pth` for torchvision and timm, `.npz` for big_vision; for "convjax"
        `.safetensors`, or without an ending a new folder of Orbax's.
      target: whose names and layouts the file gets.
      model: whose variables they are; needed for what no shape shows: a ViT whose heads are not as
        many as in the published networks of its width, or whose last norm follows the pooling.

    Raises:
      ValueError: the target has no such network, or no such ending.
      OSError: the folder is not there or cannot be written, or a folder is there already.
    """
    path = Path(path)
    if target not in get_args(Format):
        raise ValueError(f"target={target!r} must be one of {', '.join(get_args(Format))}")
    if path.suffix not in _ENDINGS[target]:
        allowed = " or ".join(ending or "no ending, a folder" for ending in _ENDINGS[target])
        raise ValueError(f"{path}: {target}'s files have {allowed}")
    strange = sorted(variables.keys() - {"params", "batch_stats"})
    if strange:
        raise ValueError(f"variables hold {', '.join(strange)}, which are no weights")
    arrays = flat(variables)
    table = make_table({name: array.shape for name, array in arrays.items()}, target, model)
    tensors = to_file(table, arrays)
    if target == "big_vision" and "cls" in tensors:
        tensors = as_first(tensors)
    if path.suffix:
        write_file(path, tensors)
    else:
        write_folder(path, tensors)
