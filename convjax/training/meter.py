"""What the steps since the last record saw: fetched from the device in one go, and looked at."""

import math
import time
from collections.abc import Iterable

import jax

from convjax.training.errors import RunError
from convjax.training.step import StepMetrics


class Meter:
    """Collects the steps' metrics, and their time.

    Attributes:
      window: metrics of each step since the last record, as far as they were fetched.
      training_seconds: time in training steps, over all pieces of the run.
    """

    def __init__(
        self, batch_size: int, window: Iterable[dict[str, float]], training_seconds: float
    ) -> None:
        """Continue with the `window` and `training_seconds` of a run so far."""
        self.window = list(window)
        self.training_seconds = training_seconds
        self._batch_size = batch_size
        self._images, self._seconds = 0, 0.0  # of this process's steps since the last record
        self._pending: list[StepMetrics] = []
        self.restart_clock()

    def restart_clock(self) -> None:
        """Count the time until now as something other than training."""
        self._mark = time.perf_counter()

    def add(self, metrics: StepMetrics) -> None:
        """Note what a step will have seen; does not wait for it."""
        self._pending.append(metrics)

    def fetch(self, step: int) -> None:
        """Wait for the steps under way, the last of which is `step`.

        Raises:
          RunError: one of them saw a number that is not finite; names the first.
        """
        fetched = jax.device_get(self._pending)
        self._pending = []
        if fetched:
            seconds = time.perf_counter() - self._mark
            self.training_seconds += seconds
            self._seconds += seconds
            self._images += len(fetched) * self._batch_size
        self.restart_clock()
        for each, metrics in enumerate(fetched, step - len(fetched) + 1):
            values = {name: float(value) for name, value in metrics.items()}
            check_finite(values, each)
            self.window.append(values)

    def summary(self) -> dict[str, float]:
        """Return the means over the window and the images per second, and begin a new window."""
        means = {
            name: math.fsum(values[name] for values in self.window) / len(self.window)
            for name in self.window[0]
        }
        rate = self._images / self._seconds
        self.window, self._images, self._seconds = [], 0, 0.0
        return means | {"images_per_second": rate}


def check_finite(values: dict[str, float], step: int) -> None:
    """Raise a RunError that names the step unless all values are finite."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise RunError(
                f"{name} is {value} at step {step}; the checkpoints from before it are kept"
            )
