"""Layer norm as a module, and response normalisation over pixels."""

import jax
import jax.numpy as jnp
import numpy as np

from convjax.layers import LayerNorm, pixel_response_norm


def test_rows_are_normalised_scaled_and_shifted():
    x = jnp.asarray([[1.0, 2.0, 3.0, 6.0]])
    variables = {"params": {"scale": jnp.full(4, 2.0), "bias": jnp.full(4, 1.0)}}
    want = 1 + 2 * (np.asarray(x) - 3) / np.sqrt(3.5 + 1e-6)
    np.testing.assert_allclose(LayerNorm().apply(variables, x), want, rtol=1e-6)
    assert LayerNorm(dtype=jnp.bfloat16).apply(variables, x).dtype == jnp.bfloat16


def test_it_starts_as_the_plain_norm():
    params = LayerNorm().init(jax.random.key(0), jnp.ones((2, 3)))["params"]
    np.testing.assert_array_equal(params["scale"], np.ones(3))
    np.testing.assert_array_equal(params["bias"], np.zeros(3))


def test_pixels_are_divided_by_those_around_them():
    """All 25 pixels of 10 count in the centre, nine in a corner: α / 25 = 4e-5."""
    y = pixel_response_norm(jnp.full((1, 5, 5, 1), 10.0))[0, :, :, 0]
    np.testing.assert_allclose(y[2, 2], 10 * (1 + 4e-5 * 2500) ** -0.75, rtol=1e-6)
    np.testing.assert_allclose(y[0, 0], 10 * (1 + 4e-5 * 900) ** -0.75, rtol=1e-6)
