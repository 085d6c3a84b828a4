"""One line for what jax says in thirty when a process of a run is lost.

jax's coordination service notices a process that is gone, and ends the others: each writes an
account of it with a stack trace and aborts, which nothing in the process can prevent. So its
errors pass through a second process, this file run as a script, which outlives it.
"""

import ctypes
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO, cast

_ACCOUNT = re.compile(
    rb"[EFW]\d{4} .*\b(coordination_service\w*\.cc|preemption_sync_manager\.cc|client\.h):\d+\]"
)
_ABORT = b"Terminating process because the JAX distributed service"
_LOST = re.compile(r"unhealthy[^:]*:\s*((?:[/\w:]*?\d+\s+)+)")
_LEADER = "leader task was preempted"
_HOLD_SECONDS = 5.0

# Python's own handlers run between two instructions: too late for an abort.
_EXIT = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: os._exit(1))


def tell_in_one_line() -> Callable[[], None]:
    """From now on, a loss that jax ends this process for is one line, and exit status 1.

    Returns:
      What ends this, where the processes end in order; else it lasts as long as this process.
    """
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    before = set_handler(signal.SIGABRT, ctypes.cast(_EXIT, ctypes.c_void_p))
    relay = subprocess.Popen([sys.executable, "-S", __file__], stdin=subprocess.PIPE)
    sys.stderr.flush()
    errors = os.dup(2)
    with cast(IO[bytes], relay.stdin) as pipe:
        os.dup2(pipe.fileno(), 2)

    def end() -> None:
        sys.stderr.flush()
        os.dup2(errors, 2)
        os.close(errors)
        relay.wait()
        set_handler(signal.SIGABRT, before)

    return end


def _relay() -> None:
    """Copy standard input to standard error, but for jax's account of a loss."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pending, held, since = b"", b"", 0.0
    while True:
        if held and _ABORT not in held and time.monotonic() - since > _HOLD_SECONDS:
            held = _write(held)  # jax did not mean to end the process
        if select.select([0], [], [], 0.2)[0]:
            chunk = os.read(0, 2**16)
            if not chunk:
                break
            *lines, pending = (pending + chunk).split(b"\n")
        else:
            lines = []
        for line in lines:
            if held or _ACCOUNT.match(line):
                since = since if held else time.monotonic()
                held += line + b"\n"
            else:
                _write(line + b"\n")
    held += pending
    _write(_summary(held.decode(errors="replace")).encode() if _ABORT in held else held)


def _summary(account: str) -> str:
    own = [line for line in account.splitlines() if line.startswith("error: ")]
    if own and "is lost" not in own[0]:
        return f"{own[0]}\n"  # this process had a reason of its own to end
    lost = _LOST.search(account)
    numbers = re.findall(r"(\d+)(?=\s)", lost[1]) if lost else []
    numbers = ["0"] if not numbers and _LEADER in account else sorted(set(numbers), key=int)
    who = f"process {', '.join(numbers)}" if numbers else "another process"
    return f"error: {who} is lost; the same command continues from the last checkpoint\n"


def _write(text: bytes) -> bytes:
    while text:
        text = text[os.write(2, text) :]
    return text


if __name__ == "__main__":
    _relay()
