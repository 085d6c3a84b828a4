"""Files of `torch.save`, read and written without torch and without running their pickles.

Since torch 1.6 a file is a zip archive: `data.pkl` describes the objects, `data/0`, `data/1` … are
the storages that its tensors are views of. Before, it was five pickles one after another (a magic
number, the version, the machine, the objects, the storages' keys), then the storages' bytes. Both
are read; the first is written.
"""

import io
import struct
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import jax.numpy as jnp
import numpy as np

from convjax.weights.pickled import Name, UnreadableError, interpret

_MAGIC = 0x1950A86A20F9469CFC6C
_DTYPES = {
    "torch.DoubleStorage": np.dtype(np.float64),
    "torch.FloatStorage": np.dtype(np.float32),
    "torch.HalfStorage": np.dtype(np.float16),
    "torch.BFloat16Storage": np.dtype(jnp.bfloat16),
    "torch.LongStorage": np.dtype(np.int64),
    "torch.IntStorage": np.dtype(np.int32),
    "torch.ShortStorage": np.dtype(np.int16),
    "torch.CharStorage": np.dtype(np.int8),
    "torch.ByteStorage": np.dtype(np.uint8),
    "torch.BoolStorage": np.dtype(np.bool_),
}
# Under these names training scripts keep the state dict, beside an optimiser's and others.
_NESTED = ("state_dict", "model")
_ALIGNMENT = 64
# What zipfile raises over archives that are none, or that ask for what does not exist.
_DAMAGE = (ValueError, OSError, EOFError, RuntimeError, zipfile.BadZipFile, struct.error)


def read_torch(path: Path) -> dict[str, np.ndarray]:
    """The state dict in a file of `torch.save`: tensors by name, views of the file's storages.

    Raises:
      ValueError: the file is damaged, holds no state dict, or names what is no part of one.
    """
    with path.open("rb") as file:
        try:
            if zipfile.is_zipfile(file):
                return _state_dict(_read_archive(file))
            file.seek(0)
            content = file.read()
            if not content:
                raise UnreadableError("it is empty")
            if content.startswith(b"PK"):
                raise UnreadableError("the zip archive is cut off")
            return _state_dict(_read_legacy(io.BytesIO(content)))
        except _DAMAGE as error:
            raise ValueError(f"{path} cannot be read as weights of torch: {error}") from error


def _read_archive(file: io.BufferedIOBase) -> Any:
    with zipfile.ZipFile(file) as archive:
        members = {PurePosixPath(member.filename): member for member in archive.infolist()}
        if any(member.compress_type != zipfile.ZIP_STORED for member in members.values()):
            raise UnreadableError("torch compresses nothing, and this archive is compressed")
        pickles = [name for name in members if name.name == "data.pkl"]
        if len(pickles) != 1:
            raise UnreadableError("the archive has no data.pkl, or several")
        root = pickles[0].parent
        order = members.get(root / "byteorder")
        byteorder = archive.read(order).decode() if order else "little"
        storages: dict[str, np.ndarray] = {}

        def storage(identity: Any) -> np.ndarray:
            dtype, key, count = _identity(identity)
            if key not in storages:
                member = members.get(root / "data" / key)
                if member is None:
                    raise UnreadableError(f"the archive has no storage {key!r}")
                storages[key] = _values(archive.read(member), dtype, count, byteorder)
            return storages[key]

        return interpret(io.BytesIO(archive.read(members[pickles[0]])), storage)


def _read_legacy(file: io.BytesIO) -> Any:
    magic = interpret(file, _no_storage)
    if magic != _MAGIC:
        raise UnreadableError("it is neither a zip archive nor begins with torch's magic number")
    version, machine = interpret(file, _no_storage), interpret(file, _no_storage)
    if version != 1001 or not isinstance(machine, dict):
        raise UnreadableError(f"version {version!r} is not 1001")
    # The storages come last: tensors are made of empty ones, which are filled once they are there.
    storages: dict[str, np.ndarray] = {}

    def storage(identity: Any) -> np.ndarray:
        dtype, key, count = _identity(identity)
        if key not in storages:
            held = sum(each.nbytes for each in storages.values())
            if held + count * dtype.itemsize > size:
                raise UnreadableError("the storages are larger than the file")
            storages[key] = np.empty(count, dtype)
        view = identity[5] if len(identity) > 5 else None
        if view is None:
            return storages[key]
        _, start, length = view
        if not 0 <= start <= start + length <= count:
            raise UnreadableError(f"a view of storage {key!r} is not within it")
        return storages[key][start : start + length]

    size = file.getbuffer().nbytes
    content = interpret(file, storage)
    byteorder = "little" if machine.get("little_endian", True) else "big"
    for key in interpret(file, _no_storage):
        if key not in storages:
            raise UnreadableError(f"nothing is made of storage {key!r}")
        count = int.from_bytes(file.read(8), byteorder)
        values = storages[key]
        values[:] = _values(file.read(values.nbytes), values.dtype, count, byteorder)
    return content


def _identity(identity: Any) -> tuple[np.dtype, str, int]:
    """The dtype, the key and the number of values in ("storage", type, key, device, values, …)."""
    if not (isinstance(identity, tuple) and len(identity) >= 5 and identity[0] == "storage"):
        raise UnreadableError(f"{identity!r} is no storage")
    if not isinstance(identity[1], Name) or identity[1] not in _DTYPES or identity[4] < 0:
        raise UnreadableError(f"{identity!r} is no storage")
    return _DTYPES[identity[1]], str(identity[2]), identity[4]


def _no_storage(identity: Any) -> Any:
    raise UnreadableError(f"{identity!r} comes where no storage can be")


def _values(content: bytes, dtype: np.dtype, count: int, byteorder: str) -> np.ndarray:
    if len(content) != count * dtype.itemsize:
        raise UnreadableError(f"a storage has {len(content)} bytes, not {count} of {dtype}")
    values = np.frombuffer(content, dtype)
    return values if byteorder == sys.byteorder else values.byteswap()


def _state_dict(content: Any) -> dict[str, np.ndarray]:
    for name in _NESTED:
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            content = content[name]
    if not isinstance(content, dict) or not content:
        raise UnreadableError("it holds no state dict")
    strangers = [name for name, value in content.items() if not isinstance(value, np.ndarray)]
    if strangers:
        raise UnreadableError(f"{strangers[0]!r} is no tensor, so it holds no state dict")
    wrapped = all(str(name).startswith("module.") for name in content)  # by DataParallel
    return {
        str(name).removeprefix("module.") if wrapped else name: content[name] for name in content
    }


def write_torch(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write tensors, float32 or int64, as `torch.save` writes a state dict."""
    with path.open("wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        _write_member(archive, file, "archive/data.pkl", _pickle(tensors))
        _write_member(archive, file, "archive/byteorder", b"little")
        for key, tensor in enumerate(tensors.values()):
            little = tensor.astype(tensor.dtype.newbyteorder("<"), copy=False)
            _write_member(archive, file, f"archive/data/{key}", little.tobytes())
        _write_member(archive, file, "archive/version", b"3\n")


def _write_member(
    archive: zipfile.ZipFile, file: io.BufferedIOBase, name: str, content: bytes
) -> None:
    """Add a member whose bytes begin at a multiple of 64, so that torch can map them."""
    member = zipfile.ZipInfo(name)  # of 1980: the same tensors give the same file
    header = 30 + len(name) + 4  # the local header's own bytes, its name, the padding's header
    padding = -(file.tell() + header) % _ALIGNMENT
    member.extra = struct.pack("<2sH", b"FB", padding) + bytes(padding)
    archive.writestr(member, content)


def _pickle(tensors: Mapping[str, np.ndarray]) -> bytes:
    """The instructions, of protocol 2, that build a dictionary of tensors over storages 0, 1, …"""
    ordered = b"ccollections\nOrderedDict\n)R"  # GLOBAL, EMPTY_TUPLE, REDUCE
    parts = [b"\x80\x02", ordered, b"("]
    for key, (name, tensor) in enumerate(tensors.items()):
        kind = {"f": b"Float", "i": b"Long"}[tensor.dtype.kind]
        strides = [
            stride // tensor.itemsize for stride in np.empty(tensor.shape, tensor.dtype).strides
        ]
        storage = b"(%sctorch\n%sStorage\n%s%s%stQ" % (
            *(_string("storage"), kind, _string(str(key)), _string("cpu")),
            _integer(tensor.size),
        )
        parts += [
            _string(name),
            b"ctorch._utils\n_rebuild_tensor_v2\n(",
            storage,
            _integer(0),
            b"(%st" % b"".join(map(_integer, tensor.shape)),
            b"(%st" % b"".join(map(_integer, strides)),
            b"\x89",  # NEWFALSE: no gradient
            ordered,  # no hooks
            b"tR",
        ]
    return b"".join([*parts, b"u."])


def _string(text: str) -> bytes:
    encoded = text.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _integer(number: int) -> bytes:
    return b"J" + struct.pack("<i", number)
