"""What a finished run came to, and what it was run on."""

import dataclasses
import importlib.metadata
import json
import resource
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import jax

from convjax.training.workdir import write_json

_PACKAGES = ("convjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of what decides a result; None if not installed."""
    found: dict[str, str | None] = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def git_revision() -> str | None:
    """Return the checkout's commit, with `-dirty` where files differ; None outside of one."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        shown = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git, or no commit
        return None
    return shown.stdout.strip()


def peak_memory_bytes() -> int:
    """Return the most memory that this process has held on the host."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_device_memory_bytes() -> int | None:
    """Return the most memory that was held on the first device, None where it does not say."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


@dataclass(frozen=True, kw_only=True)
class Result:
    """The content of result.json.

    Attributes:
      model: the network's name.
      dataset: the data's name.
      seed: of the run.
      steps: updates made.
      test_accuracy: share of the test images that the final parameters name right.
      test_loss: mean cross-entropy on them.
      best_step: the measured step of the highest test accuracy, whose checkpoint is kept.
      best_test_accuracy: test accuracy there.
      wall_seconds: from the start of the process until this was written; of a run that was
        continued, the sum over its pieces, each up to the checkpoint that was continued from.
      images_per_second: in training steps, without compilation, measurements and checkpoints.
      parameters: trainable numbers.
      mesh: devices along those of its axes that have more than one.
      peak_memory_bytes: most memory held by the process that finished the run.
      peak_device_memory_bytes: most memory held on its first device; None: not known (CPU).
      device: kind and number of devices.
      versions: of Python and of the packages that decide the result.
      git_revision: of the checkout; None outside of one.
    """

    model: str
    dataset: str
    seed: int
    steps: int
    test_accuracy: float
    test_loss: float
    best_step: int
    best_test_accuracy: float
    wall_seconds: float
    images_per_second: float
    parameters: int
    mesh: dict[str, int] = field(default_factory=dict)
    peak_memory_bytes: int = field(default_factory=peak_memory_bytes)
    peak_device_memory_bytes: int | None = field(default_factory=peak_device_memory_bytes)
    device: str = field(default_factory=lambda: describe_devices())
    versions: dict[str, str | None] = field(default_factory=versions)
    git_revision: str | None = field(default_factory=git_revision)

    def write(self, path: Path) -> None:
        """Write the result as JSON; raises as `write_json`."""
        write_json(path, dataclasses.asdict(self))

    @classmethod
    def read(cls, path: Path) -> "Result | None":
        """Return the result written at `path`, or None if there is none that can be read."""
        try:
            return cls(**json.loads(path.read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None


def describe_devices() -> str:
    """Return the kind and the number of the devices."""
    return f"{jax.devices()[0].device_kind} x{jax.device_count()}"
