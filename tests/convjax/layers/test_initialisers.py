"""Initialisers: the numbers of jax.random inside and outside of jit, with the papers' variances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convjax.layers import constant, normal, truncated_normal, uniform, variance_scaling
from convjax.layers.initialisers import _PIECE, Draw, declaring, fold_in

JAX = {
    normal: lambda key, shape: jax.random.normal(key, shape),
    truncated_normal: lambda key, shape: jax.random.truncated_normal(key, -2.0, 2.0, shape),
    uniform: lambda key, shape: jax.random.uniform(key, shape, minval=-1.0),
}
SHAPES = [(), (7,), (3, 3, 8, 5), (_PIECE + 1,), (9, _PIECE)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", JAX)
def test_numbers_are_those_of_jax_to_the_bit(kind, shape):
    key = jax.random.key(3)
    want = JAX[kind](key, shape)
    np.testing.assert_array_equal(kind(1.0)(key, shape, jnp.float32), want)
    np.testing.assert_array_equal(kind(1.0)(jax.random.key_data(key), shape), want)


@pytest.mark.parametrize("kind", JAX)
def test_jit_and_vmap_draw_the_same(kind):
    draw, keys = kind(0.3), jax.random.split(jax.random.key(0), 2)
    together = jax.jit(jax.vmap(lambda key: draw(key, (5, 7))))(keys)
    for row, key in zip(together, keys, strict=True):
        np.testing.assert_array_equal(row, draw(key, (5, 7)))


@pytest.mark.parametrize("kind", JAX)
def test_another_generator_is_left_to_jax(kind):
    key = jax.random.key(0, impl="rbg")
    np.testing.assert_array_equal(kind(1.0)(key, (6,)), JAX[kind](key, (6,)))


@pytest.mark.parametrize("number", [0, 1, 2**32 - 1])
def test_fold_in_is_that_of_jax(number):
    key = jax.random.key(5)
    want = jax.random.key_data(jax.random.fold_in(key, number))
    np.testing.assert_array_equal(fold_in(key, number), want)
    np.testing.assert_array_equal(fold_in(jax.random.key_data(key), number), want)


@pytest.mark.parametrize("distribution", ["normal", "truncated_normal", "uniform"])
@pytest.mark.parametrize(
    ("scale", "fan", "variance"),
    [(2.0, "fan_in", 2 / (9 * 64)), (2.0, "fan_out", 2 / (9 * 96)), (1.0, "fan_avg", 1 / 720)],
)
def test_variances(distribution, scale, fan, variance):
    numbers = variance_scaling(scale, fan, distribution)(jax.random.key(1), (3, 3, 64, 96))
    assert abs(numbers.var() / variance - 1) < 0.02
    assert abs(numbers.mean()) < 3 * np.sqrt(variance / numbers.size)
    if distribution == "uniform":
        assert jnp.abs(numbers).max() <= np.sqrt(3 * variance)
    if distribution == "truncated_normal":
        assert jnp.abs(numbers).max() <= 2 * np.sqrt(variance) / 0.8796


def test_what_is_declared_can_be_drawn():
    with declaring():
        draw = normal(0.5)(None, (4, 3))
        with declaring(copies=6):
            copies = variance_scaling(1.0, "fan_in", "uniform")(None, (4, 3), jnp.bfloat16)
            ones = constant(1.0)(None, (2,))
    key = jax.random.key(0)
    np.testing.assert_array_equal(draw(key), normal(0.5)(key, (4, 3)))
    assert copies == Draw("uniform", np.sqrt(3) * 0.5, (6, 4, 3), "bfloat16")
    assert copies(key).dtype == jnp.bfloat16
    np.testing.assert_array_equal(ones(None), np.ones((6, 2)))
