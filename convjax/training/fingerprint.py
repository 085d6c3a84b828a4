"""What the bits of a state add up to: the same number however the state lies on its devices.

Each 32-bit word of an array counts times an odd 64-bit number that its place gives, and these
products are added modulo 2⁶⁴. Sums do not care which device has which part, so each process adds up
its own; and as an odd number times any change of a word is no multiple of 2⁶⁴, a word that changed
is noticed. What changes in many words goes unnoticed once in 2³² or so, as with a CRC.
"""

import functools
import zlib

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree, UInt64


def fingerprint(state: PyTree[jax.Array], *, every_copy: bool = False) -> int:
    """Return 32 bits of the names, shapes, dtypes and contents of arrays, in every process.

    Args:
      state: arrays over the same devices; all processes call this together.
      every_copy: look at each device's copy of what several have, not only at the first one.

    Raises:
      ValueError: copies differ; names the array.
    """
    leaves = jax.tree.leaves_with_path(state)
    sums = np.zeros((len(leaves), jax.device_count() if every_copy else 1), np.uint64)
    for row, (_, leaf) in zip(sums, leaves, strict=True):
        for shard in leaf.addressable_shards:
            if shard.replica_id < len(row):
                copy = slice(shard.replica_id, shard.replica_id + 1)  # only arrays may overflow
                row[copy] += _weighted_sum(np.asarray(shard.data), leaf, shard.index)
    halves = multihost_utils.process_allgather(sums.view(np.uint32))  # jax's integers have 32 bits
    sums = np.asarray(halves).view(np.uint64).sum(axis=0, dtype=np.uint64)
    checksum = 0
    for row, (path, leaf) in zip(sums, leaves, strict=True):
        copies = 1 + max(shard.replica_id for shard in leaf.global_shards) if every_copy else 1
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if (row[:copies] != row[0]).any():
            raise ValueError(f"the devices' copies of {name} differ")
        described = f"{name} {leaf.dtype} {leaf.shape} {row[0]}"
        checksum = zlib.crc32(described.encode(), checksum)
    return checksum


def _weighted_sum(part: np.ndarray, whole: jax.Array, index: tuple[slice, ...]) -> np.uint64:
    """Add up a part of an array, which is at `index`; a word's weight is a product over axes."""
    size = min(part.dtype.itemsize, 4)
    words = np.asarray(part, order="C")[..., np.newaxis].view(f"u{size}").astype(np.uint64)
    words = words @ _weights(words.ndim - 1, words.shape[-1])
    for axis in reversed(range(part.ndim)):
        words = words @ _weights(axis, whole.shape[axis])[index[axis]]
    return np.uint64(words)


@functools.lru_cache(maxsize=64)
def _weights(axis: int, size: int) -> UInt64[np.ndarray, " size"]:
    """Odd numbers without a pattern; numpy promises this stream for all versions (NEP 19)."""
    return np.random.Philox(axis).random_raw(size) | np.uint64(1)
