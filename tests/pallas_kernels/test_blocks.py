"""Blocks check themselves, and defaults fit their problem."""

import pytest

from pallas_kernels import Blocks
from pallas_kernels.blocks import ceiling, side


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("blocks of m=48 must be a power of two from 16 on", {"m": 48}),
        ("blocks of n=8 must be a power of two from 16 on", {"n": 8}),
        ("blocks of k=0 must be a power of two from 16 on", {"k": 0}),
        ("warps=3 must be 1, 2, 4, 8 or 16", {"warps": 3}),
        ("warps=32 must be 1, 2, 4, 8 or 16", {"warps": 32}),
        ("stages=0 must be at least 1", {"stages": 0}),
        ("splits=0 must be at least 1", {"splits": 0}),
        ("group=-1 must be at least 1", {"group": -1}),
    ],
)
def test_errors_name_the_value_and_the_rule(message, fields):
    with pytest.raises(ValueError, match=message):
        Blocks(**{"m": 64, "n": 64, "k": 32} | fields)


@pytest.mark.parametrize(("extent", "expected"), [(0, 16), (1, 16), (17, 32), (64, 64), (99, 64)])
def test_a_side_covers_its_extent_up_to_the_largest(extent, expected):
    assert side(extent, 64) == expected


def test_ceiling():
    assert [ceiling(value, 4) for value in (0, 1, 4, 5)] == [0, 1, 1, 2]
