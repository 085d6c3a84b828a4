"""Where a run can be continued from: Orbax checkpoints that prove themselves whole.

A checkpoint holds the whole TrainState and, as JSON, the rest of the run's memory (`Progress`),
with a checksum over both. Orbax writes it in the background into a temporary folder
that becomes `checkpoints/STEP` by one rename, and deletes old ones only after that; so a run that
is killed, or whose disk fills up, leaves only whole ones and folders that the next start clears.
What a disk damages later fails the checksum, and the checkpoint before it is used.

Of several processes each writes and reads what its devices hold, in one folder that all of them
see, and all call everything here together. How a state was split is no part of a checkpoint.
"""

import contextlib
import dataclasses
import json
import logging
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint.checkpoint_managers import PreservationPolicy

from convjax.training.errors import DamagedError, RunError, one_line
from convjax.training.fingerprint import fingerprint
from convjax.training.processes import agreed, exchange, is_first
from convjax.training.state import TrainState
from convjax.training.workdir import writing


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a run remembers between two steps, beside its TrainState.

    Attributes:
      step: updates made.
      iterator: where the training images continue.
      window: metrics of each step since the last record in metrics.jsonl.
      best_step: where test accuracy was highest so far, the later of equals; None: unmeasured.
      best_accuracy: test accuracy there.
      seconds: wall time of the run so far, over all its pieces.
      training_seconds: the part of it in training steps, without compilation and measurements.
    """

    step: int
    iterator: dict[str, Any]
    window: tuple[dict[str, float], ...] = ()
    best_step: int | None = None
    best_accuracy: float | None = None
    seconds: float = 0.0
    training_seconds: float = 0.0


class Checkpoints:
    """The checkpoints of one run, for the one command that writes them."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        """Open the folder, made where there is none, and clear what was left half-written.

        Args:
          directory: holds one folder a checkpoint, named by its step.
          keep: newest ones to keep, beside the best.

        Raises:
          RunError: the folder cannot be written.
        """
        self._directory = directory.absolute()
        self._policy = _NewestAndBest(keep)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._policy, cleanup_tmp_directories=True
        )
        _let_errors_be_said_once()
        with agreed(), _refusals_named(self._directory):
            if is_first():
                self._directory.mkdir(parents=True, exist_ok=True)
        with _refusals_named(self._directory):
            self._manager = ocp.CheckpointManager(self._directory, options=options)

    def save(self, state: TrainState, progress: Progress) -> None:
        """Copy the state and write it in the background; waits for the save before it, if need be.

        The next step may consume the state: jax leaves memory alone that Orbax still reads.

        Raises:
          RunError: a number in the state is not finite, or this or the last save failed.
        """
        with agreed():
            _check_finite(state, progress.step)
        values = dataclasses.asdict(progress)
        values["checksum"] = _checksum(fingerprint(state), values)
        self._policy.best_step = progress.best_step
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), progress=ocp.args.JsonSave(values)
        )
        with _refusals_named(self._directory):
            self._manager.save(progress.step, args=items, force=True)

    def check(self) -> None:
        """Raise what a finished save in the background ended with; does not wait for one.

        Raises:
          RunError: the save failed.
        """
        if not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Wait for the save in the background; raises as `check`."""
        with _refusals_named(self._directory):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait for the save in the background and let go of the threads; raises as `check`."""
        with _refusals_named(self._directory):
            self._manager.close()


def saved_steps(directory: Path) -> list[int]:
    """Return the steps of the checkpoints in the folder, rising; empty if there is no folder."""
    if not directory.is_dir():
        return []
    names = [path.name for path in directory.iterdir() if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal())


def read_checkpoint(directory: Path, step: int, like: TrainState) -> tuple[TrainState, Progress]:
    """Return what `Checkpoints.save` saved, equal to the bit.

    Args:
      directory: holds one folder a checkpoint.
      step: which of them.
      like: a state of the same shapes and dtypes, which may be abstract; the result lies where
        its arrays do.

    Raises:
      DamagedError: it is not what was saved, or of another network.
      RunError: there is no such checkpoint, or it cannot be read just now.
    """
    path = directory.absolute() / str(step)
    if not path.is_dir():
        there = ", ".join(map(str, saved_steps(directory))) or "none"
        raise RunError(f"no checkpoint of step {step} in {directory}; there are: {there}")
    with agreed(), _damage_named(path):
        state, values = _read(path, like)
    with agreed(), _damage_named(path):
        found = fingerprint(state, every_copy=True)
        if values.pop("checksum") != _checksum(found, values):
            raise ValueError("the checksum differs")
        values["window"] = tuple(values["window"])
        return state, Progress(**values)


def read_newest(
    directory: Path, like: Callable[[], TrainState], report: Callable[[str], None]
) -> tuple[TrainState, Progress] | None:
    """Return the newest whole checkpoint, or None if there are none at all.

    Damaged ones that are newer are reported in a line each and renamed to `damaged-STEP`, so that
    the run can save those steps anew.

    Args:
      directory: holds one folder a checkpoint.
      like: makes a state of the same shapes and dtypes, which may be abstract, if it is needed.
      report: takes the lines.

    Raises:
      RunError: there are checkpoints, and all are damaged; none is renamed.
    """
    damaged: dict[int, str] = {}
    steps = map(int, exchange(" ".join(map(str, saved_steps(directory))))[0].split())
    for step in reversed(list(steps)):
        try:
            restored = read_checkpoint(directory, step, like())
        except DamagedError as error:
            damaged[step] = str(error)
            continue
        for each, problem in damaged.items():
            report(f"{problem}; continuing from step {step}")
            with agreed():
                if is_first():
                    _set_aside(directory, each)
        return restored
    if damaged:
        raise RunError(f"no checkpoint in {directory} is whole; {'; '.join(damaged.values())}")
    return None


@dataclass
class _NewestAndBest(PreservationPolicy):
    """Keeps the newest checkpoints, and the best.

    Orbax's own policy reads the metrics of all checkpoints at the start, and would fail on damage
    in one that is not even used.
    """

    newest: int
    best_step: int | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Return which of the checkpoints, given by their `step`, to keep."""
        del context
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = {*sorted(steps)[-self.newest :], self.best_step}
        return [step in kept for step in steps]


@contextlib.contextmanager
def _refusals_named(directory: Path) -> Iterator[None]:
    """Turn whatever Orbax raises while it writes into a RunError of one line."""
    try:
        yield
    except Exception as error:
        kept = ", ".join(map(str, saved_steps(directory))) or "none"
        raise RunError(
            f"cannot write {directory}: {one_line(error)}; checkpoints kept: {kept}"
        ) from error


_ECHOES = ("Event loop is closed", "Encountered error while reading array index")


def _let_errors_be_said_once() -> None:
    """Keep Orbax's threads from printing tracebacks of an error that is raised here as well.

    Each of them logs it; and as Orbax closes its event loop at the first failure, every read or
    write of TensorStore's that is still under way complains of that in its turn, or of its own end.
    """
    logger = logging.getLogger("absl")
    if _is_no_raised_error in logger.filters:
        return
    logger.addFilter(_is_no_raised_error)
    report = sys.unraisablehook

    def report_others(unraisable: Any) -> None:
        if not str(unraisable.exc_value).startswith(_ECHOES):
            report(unraisable)

    sys.unraisablehook = report_others


def _is_no_raised_error(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)


def _read(path: Path, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """Read a checkpoint's two parts; whether they are right is not looked at."""
    here = SingleDeviceSharding(jax.local_devices()[0])
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or here
        ),
        like,
    )
    items = ocp.args.Composite(
        state=ocp.args.StandardRestore(placed), progress=ocp.args.JsonRestore()
    )
    _let_errors_be_said_once()
    # No Checkpointer around it: processes would wait in it for one that fails.
    with contextlib.closing(ocp.CompositeCheckpointHandler()) as handler:
        restored = handler.restore(epath.Path(path), args=items)
    return restored["state"], restored["progress"]


@contextlib.contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Turn whatever Orbax raises while it reads into an error of one line."""
    try:
        yield
    except (PermissionError, MemoryError) as error:
        raise RunError(f"cannot read checkpoint {path}: {one_line(error)}") from error
    except Exception as error:  # Orbax and TensorStore raise whatever the damage leads them to
        raise DamagedError(f"checkpoint {path} is damaged: {one_line(error)}") from error


def _check_finite(state: TrainState, step: int) -> None:
    for path, leaf in jax.tree.leaves_with_path(state):
        parts = (
            np.asarray(shard.data) for shard in leaf.addressable_shards if not shard.replica_id
        )
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not all(map(_is_finite, parts)):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise RunError(f"{name} is not finite after step {step}; it is not saved")


def _is_finite(part: np.ndarray) -> bool:
    return bool(np.isfinite(part).all())


def _checksum(state: int, values: dict[str, Any]) -> int:
    """Return a CRC-32 of the progress, continued from the fingerprint of the state."""
    return zlib.crc32(json.dumps(values, sort_keys=True).encode(), state)


def _set_aside(directory: Path, step: int) -> None:
    aside = directory / f"damaged-{step}"
    with writing(aside):
        while aside.exists():
            aside = aside.with_name(f"{aside.name}-again")
        (directory / str(step)).rename(aside)
