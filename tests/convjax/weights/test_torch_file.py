"""Files of torch: both formats, views and types, and pickles that would run something.

`tests/goldens/make_torch_files.py` wrote the small files with torch.
"""

import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from convjax.weights.files import read_file, write_file
from convjax.weights.torch_file import read_torch

FILES = Path(__file__).parents[2] / "goldens" / "files"


@pytest.mark.parametrize("name", ["zip", "legacy"])
def test_views_of_one_storage_and_all_types(name):
    tensors = read_torch(FILES / f"{name}.pth")
    matrix = np.arange(24, dtype=np.float32).reshape(4, 6)
    np.testing.assert_array_equal(tensors.pop("whole"), matrix)
    np.testing.assert_array_equal(tensors.pop("transposed"), matrix.T)
    np.testing.assert_array_equal(tensors.pop("part"), [[6, 8, 10], [12, 14, 16]])
    np.testing.assert_array_equal(tensors.pop("parameter"), [0.5, -0.5])
    assert tensors.pop("scalar") == 7
    assert tensors.pop("empty").shape == (0, 3)
    np.testing.assert_array_equal(tensors.pop("bool"), [True, False])
    assert list(tensors) == ["float64", "float16", "bfloat16", "int32", "uint8"]
    for dtype, tensor in tensors.items():
        assert tensor.dtype.name == dtype
        np.testing.assert_array_equal(tensor.astype(np.float32), [1, 2, 3])


@pytest.mark.parametrize("name", ["zip_checkpoint", "legacy_checkpoint", "protocol4"])
def test_state_dicts_inside_of_training_checkpoints(name):
    tensors = read_torch(FILES / f"{name}.pth")
    assert list(tensors) == ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    np.testing.assert_array_equal(tensors["running_var"], [1, 1])


def test_a_whole_module_is_refused_by_name():
    with pytest.raises(ValueError, match=r"module.pth .*'torch.nn.modules.linear.Linear'"):
        read_torch(FILES / "module.pth")


class Harmful:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.system, (f"touch {self.target}",)


def write_archive(path, content):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pickle_that_runs_a_command_runs_nothing(tmp_path, protocol, is_zip):
    target = tmp_path / "harm"
    content = pickle.dumps({"weight": Harmful(target)}, protocol)
    path = tmp_path / "harmful.pth"
    if is_zip:
        write_archive(path, content)
    else:
        path.write_bytes(content)
    # Protocol 0 has instructions of its own, which torch never writes.
    with pytest.raises(ValueError, match=r"harmful.pth .*" + ("system'" if protocol else "DICT")):
        read_torch(path)
    assert not target.exists()
    pickle.loads(content)  # the very bytes do run it where they are executed
    assert target.exists()


@pytest.mark.parametrize(
    "value", [print, bytearray(b"1"), {1, 2}, complex(1), OrderedDict, {(1, 2): 3}], ids=repr
)
def test_what_is_no_part_of_weights_is_refused(tmp_path, value):
    path = tmp_path / "strange.pth"
    write_archive(path, pickle.dumps({"weight": value}, 2))
    with pytest.raises(ValueError, match=r"strange.pth cannot be read as weights of torch"):
        read_torch(path)


def tensor_pickle(offset, size, strides):
    """The pickle of {"w": a view of a storage of six floats}, by hand."""

    def numbers(values):
        return b"(" + b"".join(b"J" + struct.pack("<i", value) for value in values) + b"t"

    return (
        b"\x80\x02}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n("
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
        b"K\x06tQ"
        + b"J"
        + struct.pack("<i", offset)
        + numbers(size)
        + numbers(strides)
        + b"\x89}tRs."
    )


def write_view(path, *view, storage=bytes(24)):
    write_archive(path, tensor_pickle(*view))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/data/0", storage)


def test_a_view_stays_inside_its_storage(tmp_path):
    path = tmp_path / "view.pth"
    write_view(path, 1, (5,), (1,))
    assert read_torch(path)["w"].shape == (5,)
    for view in [(2, (5,), (1,)), (0, (2, 3), (4, 1)), (-1, (2,), (1,)), (3, (2,), (-1,))]:
        write_view(path, *view)
        with pytest.raises(ValueError, match="a tensor"):
            read_torch(path)


def test_a_storage_has_the_bytes_that_it_should(tmp_path):
    path = tmp_path / "short.pth"
    write_view(path, 0, (6,), (1,), storage=bytes(20))
    with pytest.raises(ValueError, match="a storage has 20 bytes, not 6 of float32"):
        read_torch(path)


@pytest.mark.parametrize("name", ["zip", "legacy"])
def test_every_truncation_is_a_clear_error(tmp_path, name):
    whole = (FILES / f"{name}.pth").read_bytes()
    path = tmp_path / "truncated.pth"
    for length in range(0, len(whole), 41):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"truncated\.pth"):
            read_torch(path)


ZIP, LEGACY = ((FILES / f"{name}.pth").read_bytes() for name in ("zip", "legacy"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (ZIP[:-1], "the zip archive is cut off"),
        (ZIP[: len(ZIP) // 2], "the zip archive is cut off"),
        (LEGACY[:200], "it ends within a pickle"),
        (b"hello world", "the pickle is damaged before byte 2"),
    ],
    ids=["empty", "zip", "half a zip", "legacy", "text"],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(tmp_path, content, reason):
    path = tmp_path / "a.pth"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="cannot be read") as caught:
        read_torch(path)
    assert str(caught.value) == f"{path} cannot be read as weights of torch: {reason}"


@pytest.mark.parametrize("name", ["zip", "legacy"])
def test_a_flipped_byte_gives_values_or_a_clear_error(tmp_path, name):
    whole = (FILES / f"{name}.pth").read_bytes()
    path = tmp_path / "flipped.pth"
    errors = 0
    for place in range(0, len(whole), 23):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            read_torch(path)
        except ValueError as error:
            assert "flipped.pth" in str(error)  # noqa: PT017
            errors += 1
    assert errors > 20


def test_what_is_written_is_read(tmp_path):
    tensors = {
        "conv.weight": np.arange(24, dtype=np.float32).reshape(2, 3, 4, 1),
        "norm.num_batches_tracked": np.zeros((), np.int64),
        "naïve": np.float32([np.nan, np.inf, -0.0]),
    }
    write_file(tmp_path / "a.pth", tensors)
    found = read_file(tmp_path / "a.pth")
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].tobytes() == tensor.tobytes()
        assert found[name].shape == tensor.shape


def test_storages_are_aligned_so_that_torch_can_map_them(tmp_path):
    path = tmp_path / "a.pth"
    write_file(path, {"a": np.ones(3, np.float32), "longer.name": np.ones((2, 2), np.float32)})
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            header = path.read_bytes()[member.header_offset :][:30]
            name, extra = struct.unpack("<HH", header[26:])
            assert (member.header_offset + 30 + name + extra) % 64 == 0, member.filename
