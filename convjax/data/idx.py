"""The idx format that MNIST and its successors ship in, gzipped.

Two zero bytes, one byte for the element type (0x08: unsigned byte), one for the number of axes, a
big-endian 32-bit length for each axis, then the elements in C order
(http://yann.lecun.com/exdb/mnist/).
"""

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

_UNSIGNED_BYTE = 0x08


def read_idx(path: Path, *, ndim: int) -> UInt8[np.ndarray, "..."]:
    """Read a gzipped idx file of unsigned bytes with `ndim` axes.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is damaged, or holds something else; the message names it.
    """
    try:
        with gzip.open(path, "rb") as file:
            content = file.read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    header_size = 4 + 4 * ndim
    magic = bytes([0, 0, _UNSIGNED_BYTE, ndim])
    if len(content) < header_size or content[:4] != magic:
        raise ValueError(
            f"{path} starts with {content[:4].hex()}, but an idx file of unsigned bytes with "
            f"{ndim} axes starts with {magic.hex()}"
        )
    shape = struct.unpack(f">{ndim}I", content[4:header_size])
    elements = np.frombuffer(content, np.uint8, offset=header_size)
    # int(): four 32-bit lengths of a damaged header may overflow 64 bits.
    if elements.size != np.prod([int(length) for length in shape], dtype=object):
        raise ValueError(f"{path} holds {elements.size} bytes, but its header says shape {shape}")
    return elements.reshape(shape)


def write_idx(path: Path, array: UInt8[np.ndarray, "..."]) -> None:
    """Write `array` as a gzipped idx file; the same array gives the same bytes each time."""
    header = bytes([0, 0, _UNSIGNED_BYTE, array.ndim]) + struct.pack(
        f">{array.ndim}I", *array.shape
    )
    # The name and the time that gzip keeps would differ from one writing to the next.
    with (
        path.open("wb") as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=9, mtime=0) as packed,
    ):
        packed.write(header + array.tobytes())
