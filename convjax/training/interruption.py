"""SIGTERM and Ctrl-C as a request that a loop looks at between two steps.

Where there are several processes, jax notices a SIGTERM of any of them and names a step, not yet
made by any, at which all stop.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

import jax
from jax.experimental import multihost_utils


@dataclass
class StopRequest:
    """What came: the number of a signal, or None."""

    signal_number: int | None = None

    def before(self, step: int) -> int | None:
        """Return the signal for which not even `step` is made, or None: the same in all processes.

        Args:
          step: the next one; all processes ask for each.
        """
        if not jax.distributed.is_initialized():
            return self.signal_number
        return signal.SIGTERM if multihost_utils.reached_preemption_sync_point(step) else None


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """While this lasts, note the first SIGTERM or SIGINT; a second one acts as usual.

    Python delivers signals to the main thread only; in another one this notes nothing.
    """
    request = StopRequest()
    usual = {}

    def restore() -> None:
        while usual:
            signal.signal(*usual.popitem())

    def note(number: int, frame: FrameType | None) -> None:
        request.signal_number = number
        restore()
        if jax.distributed.is_initialized():
            os.kill(os.getpid(), signal.SIGTERM)  # for jax to tell the others

    if threading.current_thread() is threading.main_thread():
        # jax has its own handler of SIGTERM where it tells the other processes.
        noted = (
            [signal.SIGINT] if jax.distributed.is_initialized() else [signal.SIGTERM, signal.SIGINT]
        )
        for number in noted:
            usual[number] = signal.signal(number, note)
    try:
        yield request
    finally:
        restore()
