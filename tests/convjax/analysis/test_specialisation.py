"""The colour index of filters worked out by hand, and towers that are or are not alike."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convjax.analysis import colour_index, specialisation, tower_means


def kernel(*filters):
    """Filters of rows of pixels of three channels, as HWIO."""
    return jnp.moveaxis(jnp.array(filters, jnp.float32), 0, -1)


def key():
    return jax.random.key(0)


# the colour index


@pytest.mark.parametrize(
    ("pixel", "index"),
    [
        ((1, 1, 1), 0),  # grey
        ((-2, -2, -2), 0),
        ((1, -1, 0), 1),  # red against green
        ((-1, -1, 2), 1),  # blue against yellow
        ((5, 0, 0), 2 / 3),  # red: a third of it is bright
        ((0, 1, 1), 1 / 3),
        ((0, 0, 0), 0),
    ],
)
def test_index_of_one_pixel(pixel, index):
    np.testing.assert_allclose(colour_index(kernel([[pixel]])), [index], rtol=0, atol=2e-7)


def test_index_weighs_pixels_by_their_energy():
    # A grey edge has energy 6, an opponent pixel 2: a quarter is chromatic.
    edge = [[(1, 1, 1), (-1, -1, -1), (1, -1, 0)]]
    # Opponent pixels of two signs do not cancel, and neither do grey ones.
    opponent = [[(1, -1, 0), (-1, 1, 0), (0, 0, 0)]]
    np.testing.assert_allclose(colour_index(kernel(edge, opponent)), [0.25, 1], atol=2e-7)


@pytest.mark.parametrize("scale", [1e-30, -3.0, 1e30])
def test_index_does_not_depend_on_scale(scale):
    values = np.random.default_rng(0).normal(size=(3, 3, 3, 5)).astype(np.float32)
    np.testing.assert_allclose(
        colour_index(jnp.asarray(values * np.float32(scale))),
        colour_index(jnp.asarray(values)),
        rtol=1e-5,
    )


def test_noise_has_two_thirds():
    values = jax.random.normal(key(), (7, 7, 3, 1000))
    np.testing.assert_allclose(colour_index(values).mean(), 2 / 3, atol=0.005)


# towers


def test_tower_means():
    values = jnp.array([0.0, 0.5, 1.0, 0.0, 1.0, 0.5])
    np.testing.assert_allclose(tower_means(values), [0.5, 0.5])
    np.testing.assert_allclose(tower_means(values, towers=3), [0.25, 0.5, 0.75])
    with pytest.raises(ValueError, match="towers=4 must divide 6 filters"):
        tower_means(values, towers=4)


def test_specialisation_of_four_filters():
    # Of the three ways to halve them, one parts zeros from ones, and two mix them.
    found = specialisation(jnp.array([0.0, 0.0, 1.0, 1.0]), key(), draws=20_000)
    assert float(found.difference) == 1
    np.testing.assert_allclose(found.chance, 1 / 3, atol=0.012)
    np.testing.assert_allclose(found.p, 1 / 3, atol=0.012)
    np.testing.assert_allclose(found.z, 2**0.5, atol=0.05)
    mixed = specialisation(jnp.array([0.0, 1.0, 0.0, 1.0]), key(), draws=20_000)
    assert float(mixed.difference) == 0
    assert float(mixed.p) == 1
    np.testing.assert_allclose(mixed.z, -(2**-0.5), atol=0.03)


def test_towers_that_part_completely_are_far_from_chance():
    values = jnp.array([0.1] * 8 + [0.9] * 8)  # 2 of 12,870 divisions part them
    found = specialisation(values, key())
    np.testing.assert_allclose(found.difference, 0.8, rtol=1e-6)
    assert float(found.p) <= 0.001
    assert float(found.z) > 3


def test_three_towers():
    values = jnp.array([0.0] * 5 + [0.5] * 5 + [1.0] * 5)
    found = specialisation(values, key(), towers=3)
    assert float(found.difference) == 1
    assert float(found.p) <= 0.001
    np.testing.assert_allclose(specialisation(values, key(), towers=5).difference, 1)


def test_filters_that_are_alike_are_not_specialised():
    found = specialisation(jnp.full(16, 0.3), key())
    assert (float(found.difference), float(found.z), float(found.p)) == (0, 0, 1)


def test_p_of_filters_that_belong_to_no_tower_is_uniform():
    values = jax.random.uniform(key(), (300, 16))
    keys = jax.random.split(jax.random.key(1), 300)
    ps = np.asarray(jax.vmap(partial(specialisation, draws=199))(values, keys).p)
    # Three standard deviations of the share of 300.
    assert abs((ps <= 0.05).mean() - 0.05) < 0.038
    assert abs((ps <= 0.5).mean() - 0.5) < 0.087


def test_all_of_it_compiles():
    def analysed(kernel, key):
        index = colour_index(kernel)
        return tower_means(index), specialisation(index, key)

    filters = kernel(*8 * [[[(1, 1, 1)]]], *8 * [[[(1, -1, 0)]]])
    means, found = jax.jit(analysed)(filters, key())
    np.testing.assert_allclose(means, [0, 1], atol=2e-7)
    np.testing.assert_allclose(found.difference, 1, rtol=1e-6)


def test_what_cannot_be_compared():
    values = jnp.zeros(6)
    with pytest.raises(ValueError, match="towers=1 must be at least 2"):
        specialisation(values, key(), towers=1)
    with pytest.raises(ValueError, match="towers=4 must divide 6 filters"):
        specialisation(values, key(), towers=4)
    with pytest.raises(ValueError, match="draws=0 must be at least 1"):
        specialisation(values, key(), draws=0)


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_specialisation_does_not_depend_on_scale(scale):
    values = jnp.linspace(0, 1, 16)
    one, other = (specialisation(values * by, key(), draws=1000) for by in (1, scale))
    np.testing.assert_allclose(other.z, one.z, rtol=1e-4)
    assert other.p == one.p < 0.01
