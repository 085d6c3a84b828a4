"""The idx reader gives back what was written, and names a file that it cannot trust."""

import gzip
from functools import partial

import numpy as np
import pytest

from convjax.data.idx import read_idx, write_idx

IMAGES = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
CONTENT = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4]) + IMAGES.tobytes()
# Without the time of day: xdist wants the same names from all that collect the tests.
compress = partial(gzip.compress, mtime=0)


def test_layout_is_the_published_one(tmp_path):
    write_idx(tmp_path / "images.gz", IMAGES)
    assert gzip.decompress((tmp_path / "images.gz").read_bytes()) == CONTENT
    np.testing.assert_array_equal(read_idx(tmp_path / "images.gz", ndim=3), IMAGES)


def test_same_array_same_bytes(tmp_path):
    write_idx(tmp_path / "a.gz", IMAGES)
    write_idx(tmp_path / "b.gz", IMAGES)
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


@pytest.mark.parametrize(
    ("packed", "complaint"),
    [
        (b"not gzip at all", "is damaged"),
        (compress(CONTENT)[:-12], "is damaged"),
        (compress(CONTENT)[:20] + b"\0" * 30, "is damaged"),
        (compress(b"\0\0"), "starts with 0000, but"),
        (compress(CONTENT[:10]), "starts with 00000803, but"),
        (compress(b"\0\0\x0d\x03" + CONTENT[4:]), "starts with 00000d03, but .* 00000803"),
        (compress(CONTENT[:-1]), r"holds 23 bytes, but its header says shape \(2, 3, 4\)"),
        (compress(CONTENT + b"\0"), "holds 25 bytes"),
        (compress(CONTENT[:4] + b"\xff" * 12 + IMAGES.tobytes()), "holds 24 bytes"),
    ],
)
def test_damage_is_named(tmp_path, packed, complaint):
    path = tmp_path / "images.gz"
    path.write_bytes(packed)
    with pytest.raises(ValueError, match=rf"{path} .*{complaint}|{path} {complaint}"):
        read_idx(path, ndim=3)


def test_another_number_of_axes(tmp_path):
    write_idx(tmp_path / "images.gz", IMAGES)
    with pytest.raises(ValueError, match="1 axes starts with 00000801"):
        read_idx(tmp_path / "images.gz", ndim=1)
