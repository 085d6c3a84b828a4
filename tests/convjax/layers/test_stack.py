"""A stack under a scan is its layers one after another, whatever the backward pass remembers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from convjax.layers import Dense, Dropout, stack


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, train, own):
        return x + Dropout(0.5)(jnp.tanh(Dense(x.shape[-1])(x)) * own.astype(x.dtype), train)


class Tower(nn.Module):
    depth: int
    remat: str = "none"

    @nn.compact
    def __call__(self, x, train=False):
        layer, own = Layer(name="layers"), jnp.arange(1.0, self.depth + 1)
        return stack(layer, self.depth, x, train, remat=self.remat, per_layer=own)


@pytest.fixture
def x():
    return jax.random.normal(jax.random.key(1), (2, 4))


def test_layers_follow_each_other_each_with_its_own(x):
    variables = Tower(3).init(jax.random.key(0), x)
    kernels = variables["params"]["layers"]["Dense_0"]["kernel"]
    assert kernels.shape == (3, 4, 4)
    want = x
    for i in range(3):
        want = want + (i + 1) * jnp.tanh(want @ kernels[i])
    np.testing.assert_allclose(Tower(3).apply(variables, x), want, rtol=1e-5)


@pytest.mark.parametrize(("remat", "products"), [("products", 3), ("all", 4)])
def test_what_is_computed_again_changes_nothing_but_memory(x, remat, products):
    variables = Tower(3).init(jax.random.key(0), x)
    rngs = {"dropout": jax.random.key(7)}

    def gradients(remat):
        model = Tower(3, remat)
        return jax.grad(lambda v: jnp.sum(model.apply(v, x, train=True, rngs=rngs) ** 2))

    plain, remembered = (jax.jit(gradients(r))(variables) for r in ("none", remat))
    # XLA fuses the two otherwise, so the last bit may differ.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), plain, remembered)
    # One product forward and two backward, of which "all" computes the first again.
    program = str(jax.make_jaxpr(gradients(remat))(variables))
    assert program.count("dot_general[") == products


def test_layers_draw_different_noise():
    x = jnp.zeros((1, 64))
    variables = Tower(2).init(jax.random.key(0), x)
    ones = jax.tree.map(lambda leaf: jnp.ones_like(leaf), variables)
    y = Tower(2).apply(ones, x, train=True, rngs={"dropout": jax.random.key(0)})
    # tanh(1) = 0.7616 from the first layer's bias or nothing; the second layer's mask is another.
    assert len(np.unique(np.round(np.asarray(y), 3))) > 2
