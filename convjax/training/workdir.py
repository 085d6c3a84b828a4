"""The folder of a run: claimed by one process at a time, each file whole or not there.

Its files:

    config.json       what the run is, but not on which devices; the same command continues it,
                      another config is refused
    checkpoints/      where it can be continued from
    metrics.jsonl     one record a line
    tensorboard/      the same records as TensorBoard events
    result.json       once it is finished, and with it curves.png and predictions.png
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from convjax.training.config import RunConfig, differing_fields, from_dict, to_dict
from convjax.training.errors import ConfigError, RunError


class Workdir:
    """Paths in a run's folder, and the JSON files among them."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.curves = self.path / "curves.png"
        self.predictions = self.path / "predictions.png"
        self.result = self.path / "result.json"
        self._config = self.path / "config.json"
        self._lock = self.path / ".lock"

    @contextlib.contextmanager
    def claimed(self, config: RunConfig) -> Iterator[None]:
        """Keep other processes out of the folder, made where there is none, while this lasts.

        Raises:
          ConfigError: the folder belongs to a run of another config; names the fields that differ.
          RunError: another process runs in it, or it cannot be written.
        """
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = self._lock.open("a")
        with lock:  # closing releases it, and so does any end of the process
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RunError(f"another process runs in {self.path}") from error
            present = self.read_config() if self._config.exists() else config
            if names := differing_fields(present, config):
                raise ConfigError(
                    f"{self.path} holds a run with other values of {', '.join(names)}; "
                    "give those, or another workdir"
                )
            yield

    def check_seen(self) -> None:
        """Raise a RunError if the folder, claimed by one process, is not there for this one."""
        if not self.path.is_dir():
            raise RunError(f"{self.path} is not there: all processes must see the same folder")

    def write_config(self, config: RunConfig) -> None:
        """Make the folder that of a run of `config`; raises as `write_json`."""
        if not self._config.exists():
            values = to_dict(config)
            del values["mesh"]  # a run may be continued, and is measured, on another one
            write_json(self._config, values)

    def read_config(self) -> RunConfig:
        """Return the config of the run in this folder, over all devices that there are.

        Raises:
          RunError: there is none, or it cannot be read.
        """
        try:
            return from_dict(json.loads(self._config.read_text()))
        except FileNotFoundError as error:
            raise RunError(f"no run in {self.path}: no file {self._config}") from error
        except ValueError as error:
            raise RunError(f"{self._config} is damaged: {error}") from error


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write `values` at once: a reader, or a run killed here, finds the old file or the new one.

    Raises:
      RunError: the file cannot be written; says why.
    """
    write_text(path, json.dumps(values, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace the file at `path` at once; raises as `write_json`."""
    partial = path.with_name(f"{path.name}.partial")
    with writing(path):
        partial.write_text(text)
        os.replace(partial, path)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's refusals to write `path` into a RunError of one line."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error
