"""Batches of a source in a fixed order: `batch(step)` is a pure function of the seed and the step.

That one property carries the rest. A run continued from step 1,000 sees what an uninterrupted one
sees, to the bit; the state to save is a number; processes that each compute their own rows need
not talk; and any number of threads may run ahead without changing the result. grain supplies those
threads and the state of the iterator.
"""

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int, Int32, UInt8

from convjax.data.augmentation import Augmentation
from convjax.data.sources import Source


class Batch(TypedDict):
    """One process's rows of a global batch.

    Attributes:
      image: pixels in 0-255.
      label: class indices.
      mask: False where a row only repeats another to fill the last batch of an epoch.
    """

    image: UInt8[np.ndarray, "b h w c"]
    label: Int32[np.ndarray, " b"]
    mask: Bool[np.ndarray, " b"]


@runtime_checkable
class BatchIterator(Protocol):
    """Batches made ahead of time in threads; the state is what was consumed, not what was made."""

    def __iter__(self) -> Iterator[Batch]: ...

    def __next__(self) -> Batch: ...

    def get_state(self) -> dict[str, Any]:
        """Return the place to continue from, as JSON can hold it."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a place that `get_state` returned, here or in an earlier process."""
        ...

    def close(self) -> None:
        """Stop the threads; what they have begun is finished and dropped."""
        ...


@functools.lru_cache(maxsize=2)  # threads at the turn of an epoch need two
def epoch_order(length: int, seed: int, epoch: int) -> Int[np.ndarray, " length"]:
    """Return the permutation of `range(length)` in which one epoch visits a source (read-only).

    The ranks of raw 64-bit draws: numpy promises the raw stream of a bit generator for all
    versions, but not what `Generator.permutation` makes of it (NEP 19).
    """
    draws = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(length)
    order = np.argsort(draws, kind="stable")
    order.setflags(write=False)
    return order


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """The batches that one process gets of a source; `make_dataset` checks and makes it."""

    source: Source
    augmentation: Augmentation
    batch_size: int
    seed: int
    train: bool
    process_index: int
    process_count: int
    image_shape: tuple[int, int, int]

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch, the last short one included; the same in every process."""
        return -(-len(self.source) // self.batch_size)

    def batch(self, step: int) -> Batch:
        """Return this process's rows of global batch `step`, counted from 0 over all epochs.

        Rows that are missing from the last batch of an epoch repeat its first ones with mask False:
        shapes never change, batch statistics see real images, and sums over `mask` see each
        example once.

        Raises:
          IndexError: `step` is negative, or past the only epoch of an evaluation.
        """
        if not 0 <= step < self._steps:
            raise IndexError(f"{step=} must be in [0, {self._steps})")
        epoch, position = divmod(step, self.steps_per_epoch)
        start = position * self.batch_size
        stop = min(start + self.batch_size, len(self.source))
        if self.train:
            indices = epoch_order(len(self.source), self.seed, epoch)[start:stop]
        else:
            indices = np.arange(start, stop)
        rows = self.batch_size // self.process_count
        mine = slice(self.process_index * rows, (self.process_index + 1) * rows)
        padded = np.resize(indices, self.batch_size)[mine].tolist()  # np.resize repeats cyclically
        examples = [self._example(epoch, index) for index in padded]
        return {
            "image": np.stack([image for image, _ in examples]),
            "label": np.array([label for _, label in examples], np.int32),
            "mask": np.arange(self.batch_size)[mine] < len(indices),
        }

    def iterator(self, *, num_threads: int = 2, buffer_size: int = 4) -> BatchIterator:
        """Iterate from step 0: without end in training, once over the source in evaluation.

        Args:
          num_threads: threads that make batches; more of them help where images are decoded.
          buffer_size: batches held ready.
        """
        import grain  # a second of imports that a look at one batch need not wait for

        options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=buffer_size)
        return iter(grain.MapDataset.range(self._steps).map(self.batch).to_iter_dataset(options))

    @property
    def _steps(self) -> int:
        return sys.maxsize if self.train else self.steps_per_epoch

    def _example(self, epoch: int, index: int) -> tuple[UInt8[np.ndarray, "h w c"], int]:
        example = self.source[index]
        if self.train:
            rng = np.random.default_rng([self.seed, epoch, index])
            image = self.augmentation.randomly(example["image"], rng)
        else:
            image = self.augmentation.centred(example["image"])
        return image, example["label"]


def make_dataset(
    source: Source,
    *,
    batch_size: int,
    seed: int = 0,
    augmentation: Augmentation | None = None,
    train: bool,
    process_index: int = 0,
    process_count: int = 1,
) -> Dataset:
    """Batch a source, shuffled and augmented anew each epoch in training, in order in evaluation.

    Over all processes, every example is seen exactly once an epoch, and the processes' rows put
    one after the other are the batch that a single process would get.

    Args:
      source: the examples.
      batch_size: rows of a global batch, over all processes.
      seed: fixes the order, and with an example's epoch and index its augmentation.
      augmentation: how images are sized and varied; None leaves them as they are.
      train: see above.
      process_index: this process's place in 0 ... process_count - 1.
      process_count: processes that share a batch.

    Raises:
      ValueError: an argument is out of bounds, or images of several sizes would stay so.
    """
    augmentation = augmentation or Augmentation()
    if len(source) == 0:
        raise ValueError("the source is empty")
    if batch_size < 1 or process_count < 1 or batch_size % process_count:
        raise ValueError(f"{process_count=} must divide {batch_size=}, both at least 1")
    if not 0 <= process_index < process_count:
        raise ValueError(f"{process_index=} must be in [0, {process_count})")
    if seed < 0:
        raise ValueError(f"{seed=} must not be negative")
    if source.image_shape is None and not augmentation.fixes_size:
        raise ValueError("the images of this source vary in size; set crop in the augmentation")
    height, width, channels = augmentation.centred(source[0]["image"]).shape
    return Dataset(
        source=source,
        augmentation=augmentation,
        batch_size=batch_size,
        seed=seed,
        train=train,
        process_index=process_index,
        process_count=process_count,
        image_shape=(height, width, channels),
    )
