"""Dropout of values and of branches: what is kept, what is scaled, and the key that it needs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convjax.layers import Dropout, drop_branch


def test_kept_values_are_scaled_and_the_share_of_zeros_is_the_rate():
    x = jnp.ones((50, 400))
    y = Dropout(0.25).apply({}, x, train=True, rngs={"dropout": jax.random.key(0)})
    assert set(np.unique(y)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs(float((y == 0).mean()) - 0.25) < 0.01


def test_evaluation_and_a_rate_of_zero_change_nothing_and_need_no_key():
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(Dropout(0.5).apply({}, x, train=False), x)
    np.testing.assert_array_equal(Dropout(0.0).apply({}, x, train=True), x)


def test_a_missing_key_and_a_wrong_rate():
    x = jnp.ones((1, 2))
    with pytest.raises(ValueError, match=r"dropout=0\.5 needs a key .*rngs=\{'dropout': key\}"):
        Dropout(0.5).apply({}, x, train=True)
    with pytest.raises(ValueError, match=r"dropout=1\.0 must lie in \[0, 1\)"):
        Dropout(1.0).apply({}, x, train=True)


def test_branches_are_dropped_whole():
    y = np.asarray(drop_branch(jnp.ones((2000, 3, 2)), 0.2, jax.random.key(1)))
    first = y[:, 0, 0]
    np.testing.assert_array_equal(y, np.broadcast_to(first[:, None, None], y.shape))
    assert set(np.unique(first)) == {np.float32(0), np.float32(1.25)}
    assert abs((first == 0).mean() - 0.2) < 0.03
