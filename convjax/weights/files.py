"""Tensors by name, read from and written to one file of whichever kind its name says.

| ends in | is |
|---|---|
| `.safetensors` | safetensors |
| `.pth`, `.pt`, `.bin`, `.tar` | `torch.save`, see `torch_file` |
| `.npz` | numpy's archive, as big_vision and vision_transformer write it |

A file is written under another name beside its place and then put there in one step: what was
there before stays whole until the new one is.
"""

import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from convjax.weights.torch_file import read_torch, write_torch

_TORCH = (".pth", ".pt", ".bin", ".tar")


def read_file(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file by name, in the types that they have there.

    Raises:
      ValueError: an ending that is not known, or a damaged file; the message names the file.
      OSError: the file is not there or cannot be read.
    """
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix in _TORCH:
        return read_torch(path)
    if path.suffix == ".npz":
        return _read_npz(path)
    raise ValueError(f"{path} must end in .safetensors, .npz or one of {', '.join(_TORCH)}")


def write_file(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write tensors, float32 or int64, by name, in place of a file that may be there.

    Raises:
      ValueError: an ending that is not known, or `.bin` or `.tar`, which are read only.
      OSError: the folder is not there or cannot be written.
    """
    if path.suffix == ".safetensors":
        metadata = {"format": "pt"}  # asked for by readers of torch's world, which else refuse
        replace(path, lambda new: safetensors.numpy.save_file(dict(tensors), new, metadata))
    elif path.suffix in (".pth", ".pt"):
        replace(path, lambda new: write_torch(new, tensors))
    elif path.suffix == ".npz":
        replace(path, lambda new: _write_npz(new, tensors))
    else:
        raise ValueError(f"{path} must end in .safetensors, .pth, .pt or .npz")


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a new file beside `path`, and put it there once it is whole on the disk."""
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    except OSError as error:  # which names the new file
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        os.fchmod(handle, 0o666 & ~_umask())
        write(Path(name))
        os.fsync(handle)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    finally:
        os.close(handle)


def _umask() -> int:
    """The process's mask of permissions, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    path.open("rb").close()  # the library's own errors do not name a missing file's path
    try:
        return safetensors.numpy.load_file(path)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from error


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        zipfile.ZipFile(path).close()  # of what is no archive, numpy leaves half-made objects
        with np.load(path, allow_pickle=False) as archive:
            tensors = {name: archive[name] for name in archive.files}
    except (
        ValueError,
        zipfile.BadZipFile,
        EOFError,
        zlib.error,
        RuntimeError,
        AttributeError,
    ) as error:
        raise ValueError(f"{path} cannot be read as .npz: {error}") from error
    return {name: _as_bfloat16(tensor) for name, tensor in tensors.items()}


def _write_npz(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    with path.open("wb") as file:
        np.savez(file, **tensors)  # pyright: ignore[reportArgumentType]


def _as_bfloat16(tensor: np.ndarray) -> np.ndarray:
    """numpy has no bfloat16, and writes it as two bytes of no meaning."""
    return tensor.view(jnp.bfloat16) if tensor.dtype == np.dtype("V2") else tensor
