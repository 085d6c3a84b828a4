"""Arrays for tests, and how far a result is from what it should be."""

import jax.numpy as jnp
import numpy as np


def normal(seed, shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def float64(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def distance(actual, expected, scale=None):
    """‖actual - expected‖ / scale, where the scale is ‖expected‖ unless given."""
    difference = np.linalg.norm(float64(actual) - expected)
    return difference / max(np.linalg.norm(expected) if scale is None else scale, 1e-30)


def assert_close(actual, expected, tolerance, scale=None):
    assert actual.shape == expected.shape
    assert distance(actual, expected, scale) <= tolerance
