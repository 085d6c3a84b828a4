"""SIGTERM and Ctrl-C as a request that a loop looks at between two steps."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopRequest:
    """What came: the number of a signal, or None."""

    signal_number: int | None = None


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

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            usual[number] = signal.signal(number, note)
    try:
        yield request
    finally:
        restore()
