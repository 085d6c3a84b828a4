"""Vision transformers as Google's JAX code keeps them: vision_transformer's and big_vision's names.

The same numbers have had several names. Files are first brought to those of today's big_vision
(`as_today`), which the table knows:

- the parameters may lie under `opt/target/`, `params/` or, with a text tower beside, `params/img/`;
- before flax's Linen, modules of all kinds in a block were counted together:
  `MultiHeadDotProductAttention_1`, `LayerNorm_2`, `MlpBlock_3`;
- positions were in `Transformer/posembed_input`, then in `Transformer`, and are at the top now;
- blocks may be one `encoderblock`, stacked along a leading axis;
- a head that pools by attention had its parts at the top.

Positions of today's big_vision have no row for the class token, which is added later: for us that
row is 0. A network with a class token is written by the oldest names, in which it has its row; all
of Google's code and timm read them.
"""

import re
from collections.abc import Callable, Mapping

import numpy as np

from convjax.weights.entries import Layout, Shape, Table, as_it_is

_PREFIXES = ("opt/target/", "params/img/", "params/", "img/")
_OLD_POSITIONS = ("Transformer/posembed_input/pos_embedding", "Transformer/pos_embedding")
_OLD_MODULES = {
    "MultiHeadDotProductAttention_1": "MultiHeadDotProductAttention_0",
    "LayerNorm_2": "LayerNorm_1",
    "MlpBlock_3": "MlpBlock_0",
}
_INLINED = ("probe", "MultiHeadDotProductAttention_0/", "LayerNorm_0/", "MlpBlock_0/")
_BLOCK = re.compile(r"Transformer/encoderblock_\d+/(\w+)/")


def name_big_vision_vit(table: Table, heads: int) -> None:
    """Heads have no norms and blocks no scales there."""
    if table.has("class_token"):
        table.add("params/class_token", "cls", as_it_is)
    if table.has("position_embedding"):  # else sines and cosines
        table.add("params/position_embedding", "pos_embedding", as_it_is)
    _name_layer(table, "patch_embedding", "embedding")
    for index in range(table.depth("blocks")):
        block = f"Transformer/encoderblock_{index}"
        _name_norm(table, "blocks/norm1", f"{block}/LayerNorm_0", index)
        attention = f"{block}/MultiHeadDotProductAttention_0"
        qkv = "params/blocks/attention/qkv"
        for part, name in enumerate(("query", "key", "value")):
            table.add(f"{qkv}/kernel", f"{attention}/{name}/kernel", _part(heads, part), index)
            table.add(f"{qkv}/bias", f"{attention}/{name}/bias", _part(heads, part), index)
        _name_out(table, heads, "blocks/attention/projection", f"{attention}/out", index)
        _name_norm(table, "blocks/norm2", f"{block}/LayerNorm_1", index)
        _name_mlp(table, "blocks/mlp", f"{block}/MlpBlock_0", index)
    _name_norm(table, "norm", "Transformer/encoder_norm")
    if table.has("pool_head"):
        _name_pool_head(table, heads)
    table.heads["head"] = "head/"
    if table.has("head"):
        _name_layer(table, "head", "head")


def _name_pool_head(table: Table, heads: int) -> None:
    table.add("params/pool_head/probe", "MAPHead_0/probe", as_it_is)
    attention = "MAPHead_0/MultiHeadDotProductAttention_0"
    for name in ("query", "key", "value"):
        ours = f"params/pool_head/attention/{name}"
        table.add(f"{ours}/kernel", f"{attention}/{name}/kernel", _split_columns(heads))
        table.add(f"{ours}/bias", f"{attention}/{name}/bias", _split_columns(heads))
    _name_out(table, heads, "pool_head/attention/projection", f"{attention}/out")
    _name_norm(table, "pool_head/norm", "MAPHead_0/LayerNorm_0")
    _name_mlp(table, "pool_head/mlp", "MAPHead_0/MlpBlock_0")


def _name_layer(table: Table, ours: str, name: str, index: int | None = None) -> None:
    for parameter in ("kernel", "bias"):
        table.add(f"params/{ours}/{parameter}", f"{name}/{parameter}", as_it_is, index)


def _name_norm(table: Table, ours: str, name: str, index: int | None = None) -> None:
    for parameter in ("scale", "bias"):
        table.add(f"params/{ours}/{parameter}", f"{name}/{parameter}", as_it_is, index)


def _name_mlp(table: Table, ours: str, name: str, index: int | None = None) -> None:
    for number in (0, 1):
        _name_layer(table, f"{ours}/fc{number + 1}", f"{name}/Dense_{number}", index)


def _name_out(table: Table, heads: int, ours: str, name: str, index: int | None = None) -> None:
    table.add(f"params/{ours}/kernel", f"{name}/kernel", _split_rows(heads), index)
    table.add(f"params/{ours}/bias", f"{name}/bias", as_it_is, index)


def _part(heads: int, part: int) -> Callable[[Shape], Layout]:
    """Queries, keys or values [..., heads, in head] of our [..., (heads, 3, in head)]."""

    def layout(shape: Shape) -> Layout:
        size = shape[-1] // (3 * heads)
        split = (*shape[:-1], heads, 3, size)
        return Layout(
            (*shape[:-1], heads, size), lambda ours: ours.reshape(split)[..., part, :], _same
        )

    return layout


def _split_columns(heads: int) -> Callable[[Shape], Layout]:
    """[..., heads, in head] for our [..., (heads, in head)]."""

    def layout(shape: Shape) -> Layout:
        split = (*shape[:-1], heads, shape[-1] // heads)
        return Layout(split, lambda ours: ours.reshape(split), _same)

    return layout


def _split_rows(heads: int) -> Callable[[Shape], Layout]:
    """[heads, in head, out] for our [(heads, in head), out]."""

    def layout(shape: Shape) -> Layout:
        split = (heads, shape[0] // heads, shape[1])
        return Layout(split, lambda ours: ours.reshape(split), _same)

    return layout


def _same(array: np.ndarray) -> np.ndarray:
    return array


def as_today(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The parameters of a file under the names of today's big_vision, without a prefix."""
    found = [prefix for prefix in _PREFIXES if f"{prefix}embedding/kernel" in tensors]
    prefix = found[0] if found else ""
    tensors = {
        name.removeprefix(prefix): tensor
        for name, tensor in _unstacked(tensors).items()
        if name.startswith(prefix)
    }
    inlined = "probe" in tensors
    today = {}
    for name, tensor in tensors.items():
        block = _BLOCK.match(name)
        if block and block[1] in _OLD_MODULES:
            name = name.replace(f"/{block[1]}/", f"/{_OLD_MODULES[block[1]]}/")
        elif name in _OLD_POSITIONS:
            name = "pos_embedding"
        elif inlined and name.startswith(_INLINED):
            name = f"MAPHead_0/{name}"
        today[name] = tensor
    return today


def _unstacked(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Blocks along a leading axis, `encoderblock`, as `encoderblock_0`, `encoderblock_1` …"""
    single = {}
    for name, tensor in tensors.items():
        before, found, after = name.partition("Transformer/encoderblock/")
        if not found or tensor.ndim == 0:
            single[name] = tensor
            continue
        for index, layer in enumerate(tensor):
            single[f"{before}Transformer/encoderblock_{index}/{after}"] = layer
    return single


def as_first(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The parameters of a network with a class token under the names that came first."""
    new_to_old = {new: old for old, new in _OLD_MODULES.items()}
    first = {}
    for name, tensor in tensors.items():
        block = _BLOCK.match(name)
        if block and block[1] in new_to_old:
            name = name.replace(f"/{block[1]}/", f"/{new_to_old[block[1]]}/")
        first[_OLD_POSITIONS[0] if name == "pos_embedding" else name] = tensor
    return first
