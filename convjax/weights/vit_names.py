"""The names of vision transformers in torchvision and timm.

Both keep queries, keys and values as rows of one matrix, ordered (3, head, in head); ours are
columns ordered (head, 3, in head), so that heads can be split over devices.
"""

from collections.abc import Callable, Mapping

import numpy as np

from convjax.weights.entries import Layout, Shape, Table, as_it_is, dense_kernel


def name_torchvision_vit(table: Table, heads: int) -> None:
    """A class token and nothing else pools there, and heads have neither norms nor scales."""
    table.add("params/class_token", "class_token", as_it_is)
    table.add("params/position_embedding", "encoder.pos_embedding", as_it_is)
    table.conv("patch_embedding", "conv_proj")
    for index in range(table.depth("blocks")):
        block = f"encoder.layers.encoder_layer_{index}"
        table.layer_norm("blocks/norm1", f"{block}.ln_1", index)
        attention = f"{block}.self_attention"
        _name_qkv(table, heads, f"{attention}.in_proj_weight", f"{attention}.in_proj_bias", index)
        table.dense("blocks/attention/projection", f"{attention}.out_proj", index)
        table.layer_norm("blocks/norm2", f"{block}.ln_2", index)
        table.dense("blocks/mlp/fc1", f"{block}.mlp.0", index)
        table.dense("blocks/mlp/fc2", f"{block}.mlp.3", index)
    table.layer_norm("norm", "encoder.ln")
    table.head("head", "heads.head")


def name_timm_vit(table: Table, heads: int, norm_pooled: bool) -> None:
    """timm's has all that ours has; a norm that follows the pooling has its own name."""
    if table.has("class_token"):
        table.add("params/class_token", "cls_token", as_it_is)
    table.add("params/position_embedding", "pos_embed", as_it_is)
    table.conv("patch_embedding", "patch_embed.proj")
    for index in range(table.depth("blocks")):
        _name_timm_block(table, heads, f"blocks.{index}", index)
    table.layer_norm("norm", "fc_norm" if norm_pooled else "norm")
    if table.has("pool_head"):
        _name_timm_pool_head(table)
    table.head("head", "head")


def _name_timm_block(table: Table, heads: int, block: str, index: int) -> None:
    table.layer_norm("blocks/norm1", f"{block}.norm1", index)
    _name_qkv(table, heads, f"{block}.attn.qkv.weight", f"{block}.attn.qkv.bias", index)
    if table.has("blocks/attention/query_norm"):
        table.layer_norm("blocks/attention/query_norm", f"{block}.attn.q_norm", index)
        table.layer_norm("blocks/attention/key_norm", f"{block}.attn.k_norm", index)
    table.dense("blocks/attention/projection", f"{block}.attn.proj", index)
    table.layer_norm("blocks/norm2", f"{block}.norm2", index)
    table.dense("blocks/mlp/fc1", f"{block}.mlp.fc1", index)
    table.dense("blocks/mlp/fc2", f"{block}.mlp.fc2", index)
    for number in (1, 2):
        if table.has(f"blocks/scale{number}"):
            table.add(f"params/blocks/scale{number}", f"{block}.ls{number}.gamma", as_it_is, index)


def _name_timm_pool_head(table: Table) -> None:
    table.add("params/pool_head/probe", "attn_pool.latent", as_it_is)
    table.dense("pool_head/attention/query", "attn_pool.q")
    for part, ours in enumerate(("key", "value")):
        ours = f"params/pool_head/attention/{ours}"
        table.add(f"{ours}/kernel", "attn_pool.kv.weight", _half(part, dense_kernel))
        table.add(f"{ours}/bias", "attn_pool.kv.bias", _half(part, as_it_is))
    table.dense("pool_head/attention/projection", "attn_pool.proj")
    table.layer_norm("pool_head/norm", "attn_pool.norm")
    table.dense("pool_head/mlp/fc1", "attn_pool.mlp.fc1")
    table.dense("pool_head/mlp/fc2", "attn_pool.mlp.fc2")


def _name_qkv(table: Table, heads: int, weight: str, bias: str, index: int) -> None:
    table.add("params/blocks/attention/qkv/kernel", weight, _qkv_kernel(heads), index)
    if "params/blocks/attention/qkv/bias" in table.shapes:
        table.add("params/blocks/attention/qkv/bias", bias, _qkv_bias(heads), index)


def _qkv_kernel(heads: int) -> Callable[[Shape], Layout]:
    def layout(shape: Shape) -> Layout:
        c_in, columns = shape
        size = columns // (3 * heads)
        return Layout(
            (columns, c_in),
            lambda ours: ours.reshape(c_in, heads, 3, size),
            lambda theirs: theirs.reshape(3, heads, size, c_in).transpose(3, 1, 0, 2),
        )

    return layout


def _qkv_bias(heads: int) -> Callable[[Shape], Layout]:
    def layout(shape: Shape) -> Layout:
        size = shape[0] // (3 * heads)
        return Layout(
            shape,
            lambda ours: ours.reshape(heads, 3, size),
            lambda theirs: theirs.reshape(3, heads, size).transpose(1, 0, 2),
        )

    return layout


def _half(part: int, whole: Callable[[Shape], Layout]) -> Callable[[Shape], Layout]:
    """The first or second half of the rows of a tensor of twice as many."""

    def layout(shape: Shape) -> Layout:
        inner = whole(shape)
        rows = inner.shape[0]

        def theirs(array: np.ndarray) -> np.ndarray:
            return inner.theirs(array[part * rows : (part + 1) * rows])

        return Layout((2 * rows, *inner.shape[1:]), inner.ours, theirs)

    return layout


def as_today(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """torchvision's first ViT files, the published ones, name the two layers of an MLP."""
    return {
        name.replace(".mlp.linear_1.", ".mlp.0.").replace(".mlp.linear_2.", ".mlp.3."): tensor
        for name, tensor in tensors.items()
    }
