"""The Vision Transformer: an image is cut into patches, which are read as words of a sentence.

Dosovitskiy et al.: An Image is Worth 16x16 Words, 2020, arXiv:2010.11929, table 1; Ti and S are of
Touvron et al., 2020, arXiv:2012.12877.

Patches are embedded by a convolution whose kernel is its stride. A class token and positions are
added, and equal blocks follow, each x + Attention(norm(x)), then x + MLP(norm(x)); they are one
block `blocks` under a scan, its parameters stacked on a leading axis. Attention is
`pallas_kernels.attention`, so the t × t matrix is never stored.

Where peers differ, by field: what is classified (`pool`): the class token (the paper, torchvision,
timm), the average over patches (without a class token), or multi-head attention pooling (Zhai et
al., 2021, arXiv:2106.04560). Positions are learned, or fixed sines and cosines (big_vision).
`activation` is the exact GELU (torch, timm), or "gelu_tanh" (big_vision and the paper's JAX code).
With `norm_pooled` the last norm follows the pooling instead of preceding it (timm's networks that
average). Parameters start as in big_vision: Glorot's uniform, biases of the MLP N(0, 1e-6²), the
head at 0.
"""

import math
from functools import partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.typing import Dtype
from jaxtyping import Array, Float

from convjax.layers import (
    Conv,
    Dense,
    Dropout,
    LayerNorm,
    Remat,
    constant,
    drop_branch,
    noise_key,
    normal,
    stack,
    truncated_normal,
    variance_scaling,
    zeros,
)
from convjax.models.network import Network, Paper, check_names
from pallas_kernels import Activation, Backend, attention

Pool = Literal["token", "average", "map"]
Positions = Literal["learned", "sincos"]

# Glorot's uniform of a square matrix: also for the three matrices that `qkv` holds side by side.
SQUARE = variance_scaling(1.0, "fan_in", "uniform")
GLOROT = variance_scaling(1.0, "fan_avg", "uniform")
LECUN = variance_scaling(1.0, "fan_in", "truncated_normal")


class Attention(nn.Module):
    """Multi-head attention of tokens to each other.

    The columns of `qkv` are ordered by head, then query, key and value: a head's columns lie
    together, so that heads can be spread over devices.
    """

    heads: int
    qk_norm: bool
    dtype: Dtype
    backend: Backend

    @nn.compact
    def __call__(self, x: Float[Array, "b t c"]) -> Float[Array, "b t c"]:
        b, t, c = x.shape
        dense = partial(Dense, kernel_init=SQUARE, dtype=self.dtype, backend=self.backend)
        qkv = dense(3 * c, name="qkv")(x).reshape(b, t, self.heads, 3, c // self.heads)
        q, k, v = qkv[..., 0, :], qkv[..., 1, :], qkv[..., 2, :]
        if self.qk_norm:
            norm = partial(LayerNorm, dtype=self.dtype, backend=self.backend)
            q, k = norm(name="query_norm")(q), norm(name="key_norm")(k)
        y = v if self.is_initializing() else attention(q, k, v, backend=self.backend)
        return dense(c, name="projection")(y.reshape(b, t, c))


class MLP(nn.Module):
    """Two dense layers with an activation between."""

    width: int
    activation: Activation
    dropout: float
    dtype: Dtype
    backend: Backend

    @nn.compact
    def __call__(self, x: Float[Array, "b t c"], train: bool) -> Float[Array, "b t c"]:
        dense = partial(
            Dense,
            kernel_init=GLOROT,
            bias_init=normal(1e-6),
            dtype=self.dtype,
            backend=self.backend,
        )
        y = dense(self.width, activation=self.activation, name="fc1")(x)
        y = Dropout(self.dropout, name="dropout")(y, train)
        return dense(x.shape[-1], name="fc2")(y)


class Block(nn.Module):
    """x + Attention(norm(x)), then x + MLP(norm(x))."""

    heads: int
    mlp_width: int
    activation: Activation
    qk_norm: bool
    layer_scale: float | None
    dropout: float
    stochastic_depth: bool
    dtype: Dtype
    backend: Backend

    @nn.compact
    def __call__(
        self, x: Float[Array, "b t c"], train: bool, drop_rate: Float[Array, ""]
    ) -> Float[Array, "b t c"]:
        fields = {"dtype": self.dtype, "backend": self.backend}
        y = LayerNorm(name="norm1", **fields)(x)
        y = Attention(self.heads, self.qk_norm, name="attention", **fields)(y)
        x = x + self._branch(y, "1", train, drop_rate)
        y = LayerNorm(name="norm2", **fields)(x)
        y = MLP(self.mlp_width, self.activation, self.dropout, name="mlp", **fields)(y, train)
        return x + self._branch(y, "2", train, drop_rate)

    def _branch(
        self, y: Float[Array, "b t c"], number: str, train: bool, drop_rate: Float[Array, ""]
    ) -> Array:
        """The branch's output with layer scale, dropout and stochastic depth."""
        if self.layer_scale is not None:
            scale = self.param(f"scale{number}", constant(self.layer_scale), y.shape[-1:])
            y = y if self.is_initializing() else y * scale.astype(y.dtype).reshape(1, 1, -1)
        y = Dropout(self.dropout, name=f"dropout{number}")(y, train)
        if self.stochastic_depth and train and not self.is_initializing():
            y = drop_branch(y, drop_rate, noise_key(self, "stochastic_depth"))
        return y


class MapHead(nn.Module):
    """Multi-head attention pooling: one learned query reads all tokens, and an MLP follows."""

    heads: int
    mlp_width: int
    activation: Activation
    dtype: Dtype
    backend: Backend

    @nn.compact
    def __call__(self, x: Float[Array, "b t c"], train: bool) -> Float[Array, "b c"]:
        b, _, c = x.shape
        fields = {"dtype": self.dtype, "backend": self.backend}
        probe = self.param("probe", GLOROT, (1, 1, c))
        if self.is_initializing():
            query = x[:, :1]
        else:
            query = jnp.broadcast_to(probe.astype(self.dtype), (b, 1, c))
        y = PoolAttention(self.heads, name="attention", **fields)(query, x)
        z = LayerNorm(name="norm", **fields)(y)
        y = y + MLP(self.mlp_width, self.activation, 0.0, name="mlp", **fields)(z, train)
        return y[:, 0]


class PoolAttention(nn.Module):
    """Multi-head attention of a few queries to all tokens."""

    heads: int
    dtype: Dtype
    backend: Backend

    @nn.compact
    def __call__(
        self, query: Float[Array, "b q c"], x: Float[Array, "b t c"]
    ) -> Float[Array, "b q c"]:
        c = x.shape[-1]
        dense = partial(Dense, c, kernel_init=SQUARE, dtype=self.dtype, backend=self.backend)

        def heads(name: str, tokens: Array) -> Array:
            return dense(name=name)(tokens).reshape(*tokens.shape[:2], self.heads, c // self.heads)

        q, k, v = heads("query", query), heads("key", x), heads("value", x)
        y = q if self.is_initializing() else attention(q, k, v, backend=self.backend)
        return dense(name="projection")(y.reshape(query.shape))


class ViT(Network):
    """Patches, positions, blocks, a norm, a pooling and one dense layer.

    Attributes:
      patch_size: sides of a patch, in pixels.
      width: channels of a token.
      depth: number of blocks.
      heads: of attention; they divide `width`.
      mlp_width: None is four times `width`.
      pool: what is classified.
      positions: what is added to the patches' embeddings.
      norm_pooled: the last norm follows the pooling.
      activation: of the MLPs.
      qk_norm: normalise queries and keys, as in Dehghani et al., 2023, arXiv:2302.05442.
      layer_scale: where the learned scales of branches start (Touvron et al., 2021,
        arXiv:2103.17239); None leaves them out.
      dropout: of embeddings, branches and the MLPs' hidden layers.
      stochastic_depth: the last block's share of dropped branches; it grows linearly from 0.
      remat: what the backward pass computes again; see `convjax.layers.stack`.
      num_classes: 0 gives the pooled features.
    """

    paper: ClassVar[Paper] = Paper(
        "Dosovitskiy, Beyer, Kolesnikov, Weissenborn, Zhai, Unterthiner, Dehghani, Minderer, "
        "Heigold, Gelly, Uszkoreit, Houlsby",
        "An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale",
        2020,
        "https://arxiv.org/abs/2010.11929",
    )
    head: ClassVar[str] = "head"

    patch_size: int
    width: int
    depth: int
    heads: int
    mlp_width: int | None = None
    pool: Pool = "token"
    positions: Positions = "learned"
    norm_pooled: bool = False
    activation: Activation = "gelu"
    qk_norm: bool = False
    layer_scale: float | None = None
    dropout: float = 0.0
    stochastic_depth: float = 0.0
    remat: Remat = "none"
    num_classes: int = 1000
    dtype: Dtype = jnp.float32
    backend: Backend = "auto"

    @nn.compact
    def __call__(
        self, images: Float[Array, "b h w c"], train: bool = False
    ) -> Float[Array, "b classes"]:
        """Images [b, h, w, c] → logits [b, num_classes] in `dtype`.

        Raises:
          ValueError: images that patches do not tile, a width that heads do not divide, an unknown
            name, or learned positions of another grid of patches.
        """
        self._check(images)
        fields = {"dtype": self.dtype, "backend": self.backend}
        x = self._pooled(self._blocks(self._tokens(images), train), train)
        if self.num_classes == 0:
            return x
        return Dense(self.num_classes, kernel_init=zeros, name="head", **fields)(x)

    def _tokens(self, images: Float[Array, "b h w c"]) -> Float[Array, "b t width"]:
        """Patch embeddings in reading order, after the class token if there is one."""
        patch = (self.patch_size, self.patch_size)
        embed = Conv(
            self.width,
            patch,
            strides=patch,
            kernel_init=LECUN,
            dtype=self.dtype,
            backend=self.backend,
            name="patch_embedding",
        )
        x = embed(images.astype(self.dtype))
        b, rows, columns, c = x.shape
        x = x.reshape(b, rows * columns, c)
        with_token = self.pool == "token"
        if with_token:
            token = self.param("class_token", zeros, (1, 1, c))
            token = x[:, :1] if self.is_initializing() else jnp.tile(token, (b, 1, 1))
            x = jnp.concatenate([token.astype(self.dtype), x], axis=1)
        if self.positions == "sincos":
            table = jnp.asarray(sincos_positions((rows, columns), c, class_token=with_token))
        else:
            table = self._learned_positions(x)
        return x if self.is_initializing() else x + table.astype(self.dtype)

    def _learned_positions(self, x: Float[Array, "b t c"]) -> Array:
        name = "position_embedding"
        if self.has_variable("params", name):
            held = self.get_variable("params", name).shape[1]
            if held != x.shape[1]:
                raise ValueError(
                    f"{name} holds {held} positions and the images give {x.shape[1]} tokens: "
                    "see convjax.models.vit.resize_positions"
                )
        return self.param(name, truncated_normal(0.02), (1, *x.shape[1:]))

    def _blocks(self, x: Float[Array, "b t c"], train: bool) -> Float[Array, "b t c"]:
        x = Dropout(self.dropout, name="dropout")(x, train)
        block = Block(
            heads=self.heads,
            mlp_width=self._mlp_width(),
            activation=self.activation,
            qk_norm=self.qk_norm,
            layer_scale=self.layer_scale,
            dropout=self.dropout,
            stochastic_depth=self.stochastic_depth > 0,
            dtype=self.dtype,
            backend=self.backend,
            name="blocks",
        )
        rates = jnp.linspace(0.0, self.stochastic_depth, self.depth)
        return stack(block, self.depth, x, train, remat=self.remat, per_layer=rates)

    def _pooled(self, x: Float[Array, "b t c"], train: bool) -> Float[Array, "b c"]:
        fields = {"dtype": self.dtype, "backend": self.backend}
        norm = LayerNorm(name="norm", **fields)
        x = x if self.norm_pooled else norm(x)
        if self.pool == "token":
            x = x[:, 0]
        elif self.pool == "average":
            x = jnp.mean(x, axis=1, dtype=jnp.float32).astype(self.dtype)
        else:
            head = MapHead(
                self.heads, self._mlp_width(), self.activation, name="pool_head", **fields
            )
            x = head(x, train)
        return norm(x) if self.norm_pooled else x

    def _mlp_width(self) -> int:
        return 4 * self.width if self.mlp_width is None else self.mlp_width

    def _check(self, images: Float[Array, "b h w c"]) -> None:
        check_names(pool=(self.pool, Pool), positions=(self.positions, Positions))
        height, width = images.shape[1:3]
        if min(height, width) < 1 or height % self.patch_size or width % self.patch_size:
            raise ValueError(
                f"images of {height}×{width} pixels: patch_size={self.patch_size} must divide both "
                f"sides, which are at least {self.patch_size}"
            )
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads} must divide width={self.width}")
        if not 0 <= self.stochastic_depth < 1:
            raise ValueError(f"stochastic_depth={self.stochastic_depth} must lie in [0, 1)")


def sincos_positions(
    grid: tuple[int, int], width: int, *, class_token: bool = False, temperature: float = 10_000.0
) -> Float[np.ndarray, "1 t width"]:
    """Sines and cosines of the column, then of the row, at width / 4 wavelengths each.

    As in big_vision and MoCo v3 (Chen et al., 2021, arXiv:2104.02057). A class token gets zeros.

    Raises:
      ValueError: 4 does not divide the width, or it is less than 8.
    """
    if width % 4 or width < 8:
        raise ValueError(f"width={width} must be a multiple of 4, and at least 8, for sincos")
    rows, columns = np.mgrid[: grid[0], : grid[1]]
    frequencies = temperature ** -(np.arange(width // 4) / (width // 4 - 1))
    x, y = (place.reshape(-1, 1) * frequencies for place in (columns, rows))
    table = np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)
    table = np.concatenate([np.zeros((int(class_token), width)), table])
    return table[None].astype(np.float32)


def resize_positions(
    table: Float[Array, "1 t width"],
    grid: tuple[int, int],
    *,
    old_grid: tuple[int, int] | None = None,
    class_token: bool = True,
) -> Float[Array, "1 t_new width"]:
    """Learned positions for another grid of patches, (rows, columns), by bicubic interpolation.

    The paper's way to train on and evaluate larger images, section 3.2. Interpolation is
    antialiased, as in timm; the class token's position is kept.

    Args:
      table: [1, tokens, width].
      grid: the new one.
      old_grid: by default the square that fits.
      class_token: whether the first position is its.

    Raises:
      ValueError: the table does not fit `old_grid`, or is no square.
    """
    token, patches = table[:, : int(class_token)], table[:, int(class_token) :]
    count = patches.shape[1]
    rows, columns = (math.isqrt(count),) * 2 if old_grid is None else old_grid
    if rows * columns != count:
        asked = "a square" if old_grid is None else f"{rows}×{columns}"
        raise ValueError(
            f"{count} positions of patches are not those of {asked} grid: see old_grid"
        )
    square = patches.reshape(1, rows, columns, -1)
    resized = jax.image.resize(square, (1, *grid, square.shape[-1]), "bicubic")
    return jnp.concatenate([token, resized.reshape(1, grid[0] * grid[1], -1)], axis=1)


# Table 1, and of Ti and S Touvron et al.'s table 1.
_SIZES = {
    "ti": {"width": 192, "depth": 12, "heads": 3},
    "s": {"width": 384, "depth": 12, "heads": 6},
    "b": {"width": 768, "depth": 12, "heads": 12},
    "l": {"width": 1024, "depth": 24, "heads": 16},
    "h": {"width": 1280, "depth": 32, "heads": 16},
}
_PATCHES = {"ti": (16,), "s": (16, 32), "b": (16, 32), "l": (16, 32), "h": (14,)}

VARIANTS: dict[str, partial[ViT]] = {
    f"vit_{size}{patch}": partial(ViT, patch_size=patch, **_SIZES[size])
    for size, patches in _PATCHES.items()
    for patch in patches
}
