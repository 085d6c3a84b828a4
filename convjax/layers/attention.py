"""Multi-head attention as modules: of tokens to each other, and of queries to tokens.

Vaswani et al., 2017, arXiv:1706.03762. The scores are `pallas_kernels.attention`'s, which never
stores the t × t matrix.
"""

from functools import partial

import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype
from jaxtyping import Array, Float

from convjax.layers.dense import Dense
from convjax.layers.initialisers import variance_scaling
from convjax.layers.layer_norm import LayerNorm
from convjax.layers.product import product
from pallas_kernels import Backend, attention

# Glorot's uniform of a square matrix: also for the three matrices that `qkv` holds side by side.
SQUARE = variance_scaling(1.0, "fan_in", "uniform")


class SelfAttention(nn.Module):
    """Multi-head attention of tokens to each other.

    The columns of `qkv` are ordered by head, then query, key and value: a head's columns lie
    together, so that heads can be spread over devices. `qk_norm` normalises queries and keys.
    """

    heads: int
    qk_norm: bool = False
    dtype: Dtype = jnp.float32
    backend: Backend = "auto"

    @nn.compact
    def __call__(self, x: Float[Array, "b t c"]) -> Float[Array, "b t c"]:
        """[b, t, c] → the same shape.

        Raises:
          ValueError: `heads` does not divide c.
        """
        b, t, c = x.shape
        _check(self.heads, c)
        dense = partial(Dense, kernel_init=SQUARE, dtype=self.dtype, backend=self.backend)
        qkv = dense(3 * c, name="qkv")(x).reshape(b, t, self.heads, 3, c // self.heads)
        q, k, v = qkv[..., 0, :], qkv[..., 1, :], qkv[..., 2, :]
        if self.qk_norm:
            norm = partial(LayerNorm, dtype=self.dtype, backend=self.backend)
            q, k = norm(name="query_norm")(q), norm(name="key_norm")(k)
        y = v if self.is_initializing() else product(attention(q, k, v, backend=self.backend))
        return dense(c, name="projection")(y.reshape(b, t, c))


class CrossAttention(nn.Module):
    """Multi-head attention of a few queries to all tokens."""

    heads: int
    dtype: Dtype = jnp.float32
    backend: Backend = "auto"

    @nn.compact
    def __call__(
        self, query: Float[Array, "b q c"], x: Float[Array, "b t c"]
    ) -> Float[Array, "b q c"]:
        """[b, q, c] queries and [b, t, c] tokens → [b, q, c].

        Raises:
          ValueError: `heads` does not divide c.
        """
        c = x.shape[-1]
        _check(self.heads, c)
        dense = partial(Dense, c, kernel_init=SQUARE, dtype=self.dtype, backend=self.backend)

        def heads(name: str, tokens: Array) -> Array:
            return dense(name=name)(tokens).reshape(*tokens.shape[:2], self.heads, c // self.heads)

        q, k, v = heads("query", query), heads("key", x), heads("value", x)
        y = q if self.is_initializing() else product(attention(q, k, v, backend=self.backend))
        return dense(name="projection")(y.reshape(query.shape))


def _check(heads: int, width: int) -> None:
    if width % heads:
        raise ValueError(f"heads={heads} must divide width={width}")
