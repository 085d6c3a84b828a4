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
head at 0; positions from N(0, 0.02²), as in the paper's code.
"""

from functools import partial
from typing import ClassVar, Literal

import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype
from jaxtyping import Array, Float

from convjax.layers import (
    Conv,
    CrossAttention,
    Dense,
    Dropout,
    LayerNorm,
    Remat,
    SelfAttention,
    constant,
    drop_branch,
    noise_key,
    normal,
    sincos_positions,
    stack,
    truncated_normal,
    variance_scaling,
    zeros,
)
from convjax.models.network import Network, Paper, check_names
from pallas_kernels import Activation, Backend

Pool = Literal["token", "average", "map"]
Positions = Literal["learned", "sincos"]

GLOROT = variance_scaling(1.0, "fan_avg", "uniform")
LECUN = variance_scaling(1.0, "fan_in", "truncated_normal")


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
        y = SelfAttention(self.heads, self.qk_norm, name="attention", **fields)(y)
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
        y = CrossAttention(self.heads, name="attention", **fields)(query, x)
        z = LayerNorm(name="norm", **fields)(y)
        y = y + MLP(self.mlp_width, self.activation, 0.0, name="mlp", **fields)(z, train)
        return y[:, 0]


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
      stochastic_depth: the last block's share of dropped branches; it grows linearly from 0 in the
        first.
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
        return self._placed(x, (rows, columns))

    def _placed(self, x: Float[Array, "b t c"], grid: tuple[int, int]) -> Float[Array, "b t c"]:
        """The tokens with their positions."""
        name, tokens = "position_embedding", x.shape[1:]
        if self.positions == "sincos":
            table = jnp.asarray(
                sincos_positions(grid, self.width, class_token=self.pool == "token")
            )
        else:
            held = self.get_variable("params", name)
            if held is not None and held.shape[1] != tokens[0]:
                raise ValueError(
                    f"{name} holds {held.shape[1]} positions and the images give {tokens[0]} "
                    "tokens: see convjax.layers.resize_positions"
                )
            table = self.param(name, truncated_normal(0.02), (1, *tokens))
        return x if self.is_initializing() else x + table.astype(self.dtype)

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
        if not 0 <= self.stochastic_depth < 1:
            raise ValueError(f"stochastic_depth={self.stochastic_depth} must lie in [0, 1)")


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
