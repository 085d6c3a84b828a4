"""Windows against the windows one can count, and errors that name the value and the rule."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import windows


@given(
    extent=st.integers(1, 30),
    taps=st.integers(1, 5),
    stride=st.integers(1, 5),
    dilation=st.integers(1, 3),
)
def test_same_has_a_window_for_every_stride_and_an_odd_pixel_after(extent, taps, stride, dilation):
    rows, _ = windows.resolve(
        (extent, 1), (taps, 1), strides=(stride, 1), padding="SAME", dilation=(dilation, 1)
    )
    assert rows.count == len(range(0, extent, stride))
    assert rows.after - rows.before in (0, 1)


@given(
    extent=st.integers(1, 12),
    taps=st.integers(1, 4),
    stride=st.integers(1, 4),
    dilation=st.integers(1, 3),
    before=st.integers(0, 4),
    after=st.integers(0, 4),
)
def test_taps_are_the_pixels_of_the_windows_that_fit(extent, taps, stride, dilation, before, after):
    padded = [-1] * before + list(range(extent)) + [-1] * after
    span = (taps - 1) * dilation + 1
    expected = [
        padded[start : start + span : dilation]
        for start in range(0, len(padded) - span + 1, stride)
    ]
    arguments = {"strides": (stride, 1), "dilation": (dilation, 1)}
    padding = ((before, after), (0, 0))
    if not expected:
        with pytest.raises(ValueError, match=f"spans {span} pixels does not fit {extent} pixels"):
            windows.resolve((extent, 1), (taps, 1), padding=padding, **arguments)
        return
    rows, columns = windows.resolve((extent, 1), (taps, 1), padding=padding, **arguments)
    image = jnp.arange(extent).reshape(1, extent, 1, 1)
    taps_last = jax.jit(
        lambda x: jnp.concatenate(list(windows.shifts(x, rows, columns, fill=-1)), axis=-1)
    )
    np.testing.assert_array_equal(taps_last(image)[0, :, 0], expected)


# The tests' type checker would object first.
unchecked = inspect.unwrap(windows.resolve)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        (r"window=\(0, 3\) must be \(down, across\), whole and each at least 1", {"size": (0, 3)}),
        (r"strides=2 must be \(down, across\), whole and each at least 1", {"strides": 2}),
        (r"strides=\(1, 1, 1\) must be \(down, across\)", {"strides": (1, 1, 1)}),
        (r"dilation=\(1, 0\) must be", {"dilation": (1, 0)}),
        (r"padding=1 must be a rule or \(\(top, bottom\), \(left, right\)\)", {"padding": 1}),
        (r"padding=\(1, 1\) must be a rule or", {"padding": (1, 1)}),
        ("padding='same' must be 'SAME', 'VALID'", {"padding": "same"}),
        (r"padding=\(0, -1\) must not be negative", {"padding": ((1, 1), (0, -1))}),
    ],
)
def test_errors_name_the_value_and_the_rule(message, arguments):
    arguments = {"image": (8, 8), "size": (3, 3), "strides": (1, 1), "padding": "SAME"} | arguments
    with pytest.raises(ValueError, match=message):
        unchecked(arguments.pop("image"), arguments.pop("size"), **arguments)
