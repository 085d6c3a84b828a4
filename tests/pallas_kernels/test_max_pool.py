"""max_pool against loops in numpy: values, the gradient's tie rule, sizes and errors."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import max_pool
from pallas_kernels.max_pool import reference


def by_loops(x, g, window, strides, edges):
    """(y, dx): the largest of each window, and g sent to the first place that holds it."""
    (top, _), (left, _) = edges
    h, w = x.shape[1:3]
    padded = np.pad(x, ((0, 0), *edges, (0, 0)), constant_values=-np.inf)
    out_h = (padded.shape[1] - window[0]) // strides[0] + 1
    out_w = (padded.shape[2] - window[1]) // strides[1] + 1
    y, dx = np.zeros((x.shape[0], out_h, out_w, x.shape[3])), np.zeros_like(padded)
    for b, p, q, c in np.ndindex(*y.shape):
        row, column = p * strides[0], q * strides[1]
        seen = padded[b, row : row + window[0], column : column + window[1], c]
        i, j = np.unravel_index(np.argmax(seen), seen.shape)
        y[b, p, q, c] = seen[i, j]
        if g is not None:
            dx[b, row + i, column + j, c] += g[b, p, q, c]
    return y, dx[:, top : top + h, left : left + w]


@st.composite
def cases(draw):
    pair = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(2))  # noqa: E731
    window = pair(1, 3)
    image = tuple(draw(st.integers(k, 8)) for k in window)
    edges = tuple((draw(st.integers(0, k - 1)), draw(st.integers(0, k - 1))) for k in window)
    return (draw(st.integers(0, 2)), *image, 2), window, pair(1, 3), edges


@given(case=cases())
def test_values_and_gradients_agree_with_loops_also_where_values_are_equal(case):
    shape, window, strides, edges = case
    rng = np.random.default_rng(0)
    x = rng.integers(0, 3, shape).astype(np.float32)  # three values: ties everywhere
    expected, _ = by_loops(x, None, window, strides, edges)
    g = rng.standard_normal(expected.shape).astype(np.float32)
    _, expected_dx = by_loops(x, g, window, strides, edges)

    @jax.jit
    def run(x, g):
        y, pull = jax.vjp(lambda x: max_pool(x, window=window, strides=strides, padding=edges), x)
        return y, *pull(g)

    y, dx = run(x, g)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_allclose(dx, expected_dx, atol=1e-5)


def test_the_first_of_equal_values_gets_the_whole_gradient():
    dx = jax.grad(lambda x: jnp.sum(max_pool(x, window=(2, 2), strides=(2, 2), padding="VALID")))(
        jnp.ones((1, 2, 2, 1))
    )
    assert dx.ravel().tolist() == [1, 0, 0, 0]


def test_forward_mode_follows_the_largest():
    x = jnp.arange(16.0).reshape(1, 4, 4, 1)
    _, dy = jax.jvp(
        lambda x: max_pool(x, window=(2, 2), strides=(2, 2), padding="VALID"), (x,), (10 * x,)
    )
    assert dy.ravel().tolist() == [50, 70, 130, 150]


@pytest.mark.parametrize(
    ("extent", "padding", "out"),
    [
        (112, ((0, 1), (0, 1)), 56),  # ceil mode
        (55, ((0, 0), (0, 0)), 27),  # ceil mode and floor mode alike
        (55, "SAME", 28),
        (112, ((1, 1), (1, 1)), 56),  # ResNet
    ],
)
def test_sizes_of_3x3_windows_with_stride_2(extent, padding, out):
    y = jax.eval_shape(
        lambda x: max_pool(x, window=(3, 3), strides=(2, 2), padding=padding),
        jax.ShapeDtypeStruct((1, extent, extent, 1), jnp.float32),
    )
    assert y.shape == (1, out, out, 1)


def test_padding_is_never_the_largest():
    options = {"window": (3, 3), "strides": (2, 2), "padding": ((1, 1), (1, 1))}
    assert max_pool(jnp.full((1, 2, 2, 1), -7.0), **options).item() == -7
    assert max_pool(jnp.full((1, 2, 2, 1), -7, jnp.int8), **options).item() == -7
    assert max_pool(jnp.full((1, 2, 2, 1), 7, jnp.uint8), **options).item() == 7


@pytest.mark.parametrize("place", range(4))
def test_nan_is_the_largest(place):
    x = jnp.arange(4.0).at[place].set(jnp.nan).reshape(1, 2, 2, 1)
    assert jnp.isnan(max_pool(x, window=(2, 2), strides=(1, 1), padding="VALID").item())


@pytest.mark.parametrize(
    ("message", "options"),
    [
        (
            r"padding=\(2, 0\) leaves a window of height 2 with no pixel",
            {"padding": ((2, 0), (0, 0))},
        ),
        (
            r"padding=\(0, 3\) leaves a window of width 2 with no pixel",
            {"padding": ((0, 0), (0, 3))},
        ),
        ("spans 9 pixels does not fit 4", {"window": (9, 2)}),
        (r"strides=\(0, 1\) must be", {"strides": (0, 1)}),
        ("backend='cuda' must be one of", {"backend": "cuda"}),
    ],
)
def test_errors_name_the_value_and_the_rule(message, options):
    options = {"window": (2, 2), "strides": (1, 1), "padding": "VALID"} | options
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(max_pool)(jnp.ones((1, 4, 4, 1)), **options)


def test_backends_to_come_are_not_replaced_in_silence():
    with pytest.raises(NotImplementedError, match="max_pool has no backend 'interpret'"):
        max_pool(
            jnp.ones((1, 4, 4, 1)),
            window=(2, 2),
            strides=(2, 2),
            padding="VALID",
            backend="interpret",
        )


@pytest.mark.parametrize("padding", ["SAME", "VALID", ((1, 0), (0, 2))])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_values_are_those_of_the_reference(padding, dtype):
    x = jnp.asarray(np.random.default_rng(0).integers(-100, 100, (2, 7, 8, 3)), dtype)
    options = {"window": (3, 3), "strides": (2, 1), "padding": padding}
    np.testing.assert_array_equal(max_pool(x, **options), reference(x, **options))
