"""The table of a network in a format: which function names its layers, and what it has to know."""

from collections.abc import Mapping
from typing import Literal

from flax import linen as nn

from convjax.models.alexnet_owt import OneWeirdTrick
from convjax.models.googlenet import GoogLeNet
from convjax.models.resnet import ResNet
from convjax.models.vgg import VGG
from convjax.models.vit import ViT
from convjax.weights.big_vision import name_big_vision_vit
from convjax.weights.entries import Shape, Table, as_it_is
from convjax.weights.torch_names import name_alexnet, name_googlenet, name_resnet, name_vgg
from convjax.weights.vit_names import name_timm_vit, name_torchvision_vit

Format = Literal["torchvision", "timm", "big_vision", "convjax"]

_CONVOLUTIONAL = {
    ("torchvision", OneWeirdTrick): name_alexnet,
    ("torchvision", VGG): name_vgg,
    ("torchvision", GoogLeNet): name_googlenet,
    ("torchvision", ResNet): name_resnet,
    ("timm", ResNet): name_resnet,
}
# Of the published networks, by width; they are not seen in the shapes of the parameters.
_HEADS = {192: 3, 384: 6, 512: 8, 768: 12, 1024: 16, 1152: 16, 1280: 16, 1408: 16, 1664: 16}


def make_table(shapes: Mapping[str, Shape], form: Format, model: nn.Module | None) -> Table:
    """The entries of all arrays of a network.

    Args:
      shapes: of its arrays by path.
      form: the format.
      model: the network; None: whatever has these shapes, with the published number of heads.

    Raises:
      ValueError: the format has no such network.
    """
    table = Table(shapes, form)
    if form == "convjax":
        for path in shapes:
            table.add(path, path, as_it_is)
        for module in (getattr(model, "head", ""), "aux1/fc2", "aux2/fc2"):
            table.heads[module] = f"params/{module}/"
        return table
    family = _family(shapes) if model is None else _class_of(model)
    if family is ViT:
        _name_vit(table, form, model)
    elif (form, family) in _CONVOLUTIONAL:
        if family is ResNet:
            _check_resnet(table, model)
        _CONVOLUTIONAL[form, family](table)
    else:
        network = "these variables" if model is None else type(model).__name__
        raise ValueError(f"{form} has no form for {network}")
    table.check_whole()
    return table


def _class_of(model: nn.Module) -> type | None:
    classes = {*(family for _, family in _CONVOLUTIONAL), ViT}
    return next((family for family in classes if isinstance(model, family)), None)


def _family(shapes: Mapping[str, Shape]) -> type | None:
    """The class of network that has arrays of these names and shapes."""
    signatures = {
        "params/patch_embedding/kernel": ViT,
        "params/inception_3a/1x1/conv/kernel": GoogLeNet,
        "params/conv1_1/kernel": VGG,
        "params/conv2_1/conv1/kernel": ResNet,
    }
    for path, family in signatures.items():
        if path in shapes:
            return family
    # AlexNet's layers have the same names in the form of 2012, which has more filters.
    first = shapes.get("params/conv1/kernel", ())
    return OneWeirdTrick if first[:2] == (11, 11) and first[-1] == 64 else None


def _name_vit(table: Table, form: Format, model: nn.Module | None) -> None:
    norm_pooled = isinstance(model, ViT) and model.norm_pooled
    heads = model.heads if isinstance(model, ViT) else _published_heads(table.shapes)
    if form == "timm":
        return name_timm_vit(table, heads, norm_pooled)
    if norm_pooled:
        raise ValueError(f"norm_pooled=True: {form} has no norm after the pooling")
    return (name_torchvision_vit if form == "torchvision" else name_big_vision_vit)(table, heads)


def _published_heads(shapes: Mapping[str, Shape]) -> int:
    width = shapes["params/patch_embedding/kernel"][-1]
    norm = shapes.get("params/blocks/attention/query_norm/scale")
    if norm is not None:
        return width // norm[-1]
    if width not in _HEADS:
        raise ValueError(f"width={width} is no published one, so save_weights needs model=")
    return _HEADS[width]


def _check_resnet(table: Table, model: nn.Module | None) -> None:
    """Raise a ValueError for a form of ours that has torchvision's names and is not its network."""
    rows, columns = table.shapes["params/conv1/kernel"][:2]
    if (rows, columns) != (7, 7):
        raise ValueError(
            f"{table.format} has no form for a ResNet whose conv1 is {rows}×{columns}, only for 7×7"
        )
    if isinstance(model, ResNet):
        shortcut, strided_layer = model.shortcut, model.strided_layer
    else:
        projects = table.has("conv3_1/shortcut") or not table.has("conv3_1")
        shortcut, strided_layer = "projection" if projects else "none", "3x3"
    if shortcut != "projection":
        raise ValueError(
            f"{table.format} has no form for a ResNet with shortcut={shortcut!r}, "
            "only with 'projection'"
        )
    if table.has("conv2_1/conv3") and strided_layer != "3x3":
        raise ValueError(
            f"strided_layer={strided_layer!r}: {table.format}'s bottlenecks halve the image in the "
            "3×3; their weights do not fit a network that does so elsewhere"
        )
