"""The taps of both directions: literal ones, and all against the definition."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.taps import Seen, Taps, Walk, at, divide, pixel_of, taps
from pallas_kernels.windows import Windows


def windows(extent, count, stride=1, dilation=1, padding=(0, 0)):
    """Windows of `count` taps."""
    return Windows(extent, count, stride, dilation, *padding)


def test_forward_is_one_phase():
    assert taps(windows(8, 3, stride=2, padding=(1, 1)), "forward") == Taps(
        phases=1,
        outputs=4,
        extent=4,
        source=8,
        stride=2,
        step=1,
        shift=1,
        first=(0,),
        count=(3,),
        offset=(-1,),
    )


def test_transposed_with_stride_2_three_taps_and_padding_1():
    # Even pixels see y at h / 2 under the middle tap; odd ones at (h + 1) / 2 under the first and
    # at (h - 1) / 2 under the last.
    assert taps(windows(8, 3, stride=2, padding=(1, 1)), "transposed") == Taps(
        phases=2,
        outputs=4,
        extent=8,
        source=4,
        stride=1,
        step=2,
        shift=-1,
        first=(1, 0),
        count=(1, 2),
        offset=(0, 1),
    )


@pytest.mark.parametrize(
    ("along", "expected"),
    [
        # A stride without padding: the AlexNet stem's 11 taps fall on the phases 0, 4, 8 and so on.
        (windows(227, 11, stride=4), {"first": (0, 1, 2, 3), "count": (3, 3, 3, 2), "step": 4}),
        # More phases than taps: the last sees nothing.
        (windows(11, 3, stride=4), {"count": (1, 1, 1, 0)}),
        # Taps two apart under a stride of 2 all fall on one phase.
        (windows(9, 3, stride=2, dilation=2), {"count": (3, 0), "step": 1, "shift": -1}),
        # Taps three apart fall on every phase of 2, and skip a pixel of y.
        (windows(9, 3, stride=2, dilation=3), {"first": (0, 1), "count": (2, 1), "shift": -3}),
        (windows(5, 1), {"first": (0,), "count": (1,), "offset": (0,), "leave": False}),
        (windows(5, 3), {"count": (3,), "leave": True, "ragged": False}),
        (windows(9, 2, stride=2), {"outputs": 5, "extent": 9, "ragged": True}),
    ],
)
def test_which_taps_hit_in_each_phase(along, expected):
    found = taps(along, "transposed")
    assert {name: getattr(found, name) for name in expected} == expected


@st.composite
def drawn_windows(draw):
    count, dilation, stride = (draw(st.integers(1, most)) for most in (6, 4, 5))
    before, after = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    span = (count - 1) * dilation + 1
    extent = draw(st.integers(max(1, span - before - after), 24))
    return windows(extent, count, stride, dilation, (before, after))


def walked(found):
    """(output pixel, source pixel, tap) of all that a kernel walks over, outside images too."""
    for phase, (first, count, offset) in enumerate(
        zip(found.first, found.count, found.offset, strict=True)
    ):
        for i in range(found.outputs):
            for u in range(count):
                yield (
                    i * found.phases + phase,
                    i * found.stride + offset + u * found.shift,
                    first + u * found.step,
                )


@settings(max_examples=300)
@given(drawn_windows())
def test_both_directions_are_the_same_pairs_of_pixels(along):
    by_definition = {
        (x, y, tap)
        for y in range(along.count)
        for tap in range(along.taps)
        if 0 <= (x := y * along.stride + tap * along.dilation - along.before) < along.extent
    }
    for direction in ("forward", "transposed"):
        found = taps(along, direction)
        inside = [
            (output, source, tap)
            for output, source, tap in walked(found)
            if output < found.extent and 0 <= source < found.source
        ]
        assert len(inside) == len(set(inside))
        assert by_definition == {
            (output, source, tap) if direction == "transposed" else (source, output, tap)
            for output, source, tap in inside
        }


@settings(max_examples=300)
@given(drawn_windows(), st.sampled_from(["forward", "transposed"]))
def test_no_mask_where_every_pixel_is_there(along, direction):
    found = taps(along, direction)
    assert found.leave == any(not 0 <= source < found.source for _, source, _ in walked(found))
    assert found.ragged == (found.outputs * found.phases != found.extent)


@settings(max_examples=60)
@given(drawn_windows(), drawn_windows(), st.sampled_from(["forward", "transposed"]))
def test_seen_is_what_is_inside_the_source(rows, columns, direction):
    down, across = taps(rows, direction), taps(columns, direction)
    row, column = jnp.asarray(np.random.default_rng(0).integers(-8, 32, (2, 64)), jnp.int32)
    seen = Seen.make(row, column, down, across, always=False, merged=False)
    for u, v in np.ndindex(max(down.count), max(across.count)):
        expected = inside(row + u * down.shift, down) & inside(column + v * across.shift, across)
        np.testing.assert_array_equal(seen.tap(jnp.int32(u), jnp.int32(v)), expected)


def inside(position, axis):
    return (position >= 0) & (position < axis.source)


@pytest.mark.parametrize(("across", "bits"), [(8, True), (9, False)])
def test_up_to_32_taps_fit_into_the_bits(across, bits):
    down, across = (taps(windows(20, n, padding=(2, 2)), "forward") for n in (4, across))
    row = column = jnp.arange(-2, 20, dtype=jnp.int32)
    seen = Seen.make(row, column, down, across, always=True, merged=False)
    assert (seen.bits is not None) == bits
    last = across.count[0] - 1
    expected = inside(row + 3, down) & inside(column + last, across)
    np.testing.assert_array_equal(seen.tap(3, last), expected)


@pytest.mark.parametrize("shape", [(2, 3, 2), (3, 1, 2), (2, 3, 1), (3, 1, 1), (1, 1, 4)])
def test_a_walk_goes_along_channels_then_across_then_down(shape):
    walk = Walk(*shape)
    place, places = (jnp.int32(0),) * 3, []
    for _ in range(walk.steps):
        places.append(tuple(map(int, place)))
        place = walk.next(*place)
    assert places == list(np.ndindex(shape))


def test_numbers_of_pixels():
    assert [int(at((5, 7, 9), jnp.int32(i))) for i in range(3)] == [5, 7, 9]
    assert at((4, 4), jnp.int32(1)) == 4
    assert tuple(map(int, divide(jnp.int32(17), 5))) == (3, 2)
    assert [x.tolist() for x in pixel_of(jnp.array([0, 5, 12, 23]), 3, 4)] == [
        [0, 0, 1, 1],
        [0, 1, 0, 2],
        [0, 1, 0, 3],
    ]
