"""Pooling: the rules on which peers differ, by their numbers, and against a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from convjax.layers import adaptive_avg_pool, avg_pool, global_avg_pool, max_pool


@pytest.mark.parametrize(
    ("size", "ceil_mode", "expected"),
    [(112, True, 56), (55, True, 27), (112, False, 55), (55, False, 27), (13, True, 6)],
)
def test_overlapping_pools_of_the_lineage(size, ceil_mode, expected):
    x = jnp.zeros((1, size, size, 1))
    assert max_pool(x, (3, 3), (2, 2), ceil_mode=ceil_mode).shape == (1, expected, expected, 1)


def test_a_ceil_window_that_would_start_in_the_padding_is_dropped():
    # torch.nn.MaxPool2d(2, 2, padding=1, ceil_mode=True) on 3x3 gives 2x2, not 3x3.
    x = jnp.arange(9.0).reshape(1, 3, 3, 1)
    y = max_pool(x, (2, 2), (2, 2), padding=1, ceil_mode=True)
    np.testing.assert_array_equal(y[0, :, :, 0], [[0.0, 2.0], [6.0, 8.0]])


@pytest.mark.parametrize(("count_padding", "expected"), [(True, [1.5, 1.0]), (False, [1.5, 2.0])])
def test_average_pooling_counts_padding_or_not(count_padding, expected):
    x = jnp.array([1.0, 2.0]).reshape(1, 1, 2, 1)
    y = avg_pool(x, (1, 2), (1, 1), padding=((0, 0), (0, 1)), count_padding=count_padding)
    np.testing.assert_allclose(y[0, 0, :, 0], expected)


def loop_avg_pool(x, k, s, p, ceil_mode, count_padding):
    """torch.nn.functional.avg_pool2d in one dimension, window by window."""
    size = len(x)
    span = size + 2 * p - k
    windows = (-(-span // s) if ceil_mode else span // s) + 1
    if ceil_mode and (windows - 1) * s >= size + p:
        windows -= 1
    out = []
    for i in range(windows):
        start = i * s - p
        stop = min(start + k, size + p)
        counted = stop - start
        start, stop = max(start, 0), min(stop, size)
        out.append(sum(x[start:stop]) / (counted if count_padding else stop - start))
    return out


@given(
    size=st.integers(3, 12),
    k=st.integers(1, 4),
    s=st.integers(1, 4),
    p=st.integers(0, 2),
    ceil_mode=st.booleans(),
    count_padding=st.booleans(),
)
def test_average_pooling_equals_a_loop(size, k, s, p, ceil_mode, count_padding):
    x = np.random.default_rng(size).normal(size=size).astype(np.float32)
    assume(p < k <= size + 2 * p)
    want = loop_avg_pool(x, k, s, p, ceil_mode, count_padding)
    padding = ((p, p), (0, 0))
    got = avg_pool(
        jnp.asarray(x).reshape(1, size, 1, 1),
        (k, 1),
        (s, 1),
        padding=padding,
        ceil_mode=ceil_mode,
        count_padding=count_padding,
    )
    np.testing.assert_allclose(got[0, :, 0, 0], want, rtol=1e-5, atol=1e-6)


def test_global_average_sums_in_float32():
    x = jnp.full((1, 64, 64, 1), 1.0078125, jnp.bfloat16)
    y = global_avg_pool(x)
    assert y.dtype == jnp.bfloat16
    assert y[0, 0] == jnp.bfloat16(1.0078125)


def test_a_gradient_is_spread_evenly_by_averages():
    grad = jax.grad(lambda x: avg_pool(x, (2, 2), (2, 2)).sum())(jnp.ones((1, 4, 4, 1)))
    np.testing.assert_array_equal(grad, jnp.full((1, 4, 4, 1), 0.25))


def test_a_window_larger_than_the_image_is_an_error():
    with pytest.raises(ValueError, match="a window that spans 7 pixels does not fit 5 pixels"):
        max_pool(jnp.ones((1, 5, 5, 1)), (7, 7), (1, 1))


def test_a_window_of_padding_only_is_an_error():
    with pytest.raises(ValueError, match=r"padding=\(1, 1\) must be smaller than the window's 1"):
        avg_pool(jnp.ones((1, 5, 5, 1)), (1, 1), (1, 1), padding=1)


def test_strides_of_nought_are_an_error():
    with pytest.raises(ValueError, match=r"strides=\(0, 0\) must be"):
        max_pool(jnp.ones((1, 5, 5, 1)), (2, 2), (0, 0), ceil_mode=True)


def test_adaptive_windows_are_those_of_torch():
    """torch: of 5 pixels to 2 the windows are 0-2 and 2-4; of 2 to 3 they are 0, 0-1 and 1."""
    x = jnp.arange(5.0).reshape(1, 5, 1, 1) * jnp.ones((1, 1, 5, 1))
    np.testing.assert_allclose(adaptive_avg_pool(x, (2, 2))[0, :, 0, 0], [1.0, 3.0])
    two = jnp.asarray([[1.0, 3.0]]).reshape(1, 1, 2, 1)
    np.testing.assert_allclose(adaptive_avg_pool(two, (1, 3))[0, 0, :, 0], [1.0, 2.0, 3.0])
    same = jax.random.normal(jax.random.key(0), (2, 6, 6, 3))
    np.testing.assert_array_equal(adaptive_avg_pool(same, (6, 6)), same)
    np.testing.assert_allclose(
        adaptive_avg_pool(same, (1, 1))[:, 0, 0], global_avg_pool(same), rtol=1e-6
    )
