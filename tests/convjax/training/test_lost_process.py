"""jax's account of a lost process becomes one line; all else passes."""

import subprocess
import sys

import pytest

from convjax.training import lost_process

FATAL = """\
F1130 23:24:52.257933   27789 client.h:80] Terminating process because the JAX distributed service \
detected fatal errors. This most likely indicates that another task died; see the other task logs. \
absl::Status: {status}
*** Check failure stack trace: ***
    @     0x7f345c840634  absl::lts_20260107::log_internal::LogMessage::SendToLog()
"""
WORKER = """\
E1130 23:28:12.613081   28900 coordination_service.cc:1549] [15259799365170924172] Use error \
polling to propagate the following error to all tasks: UNAVAILABLE: The following tasks are \
unhealthy (stopped sending heartbeats):
1
12
The tasks have crashed. Check the task logs for an earlier error. [type.googleapis.com/x='']
E1130 23:28:12.614084   28911 coordination_service_agent.cc:289] Polled an error from coordination \
service (this can be an error from this or another task).
""" + FATAL.format(status="UNAVAILABLE: The following tasks are unhealthy:\n1\n12\nThe tasks have")
LEADER = FATAL.format(
    status="UNAVAILABLE: Failed to send RPC to coordination service. Either the leader task was "
    "preempted/died/restarted unexpectedly or this task is experiencing network issues."
)
GOES_ON = "is lost; the same command continues from the last checkpoint\n"


def relayed(text: str) -> str:
    command = [sys.executable, "-S", lost_process.__file__]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a warning\nand half a line", "a warning\nand half a line"),
        (f"a warning\n{WORKER}", f"a warning\nerror: process 1, 12 {GOES_ON}"),
        (LEADER, f"error: process 0 {GOES_ON}"),
        (FATAL.format(status="unknown"), f"error: another process {GOES_ON}"),
        (f"{LEADER}error: another process is lost: Gloo\n", f"error: process 0 {GOES_ON}"),
        (f"{LEADER}error: loss is nan at step 3\n", "error: loss is nan at step 3\n"),
        (WORKER.partition("F1130")[0], WORKER.partition("F1130")[0]),
    ],
)
def test_errors_as_they_are_read(text, expected):
    assert relayed(text) == expected


def test_an_abort_is_an_exit_and_said_in_one_line():
    program = (
        "import ctypes, os, sys\n"
        "from convjax.training.lost_process import tell_in_one_line\n"
        "tell_in_one_line()\n"
        f"os.write(2, {LEADER!r}.encode())\n"
        "ctypes.CDLL(None).abort()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, f"error: process 0 {GOES_ON}")


def test_after_an_end_in_order_all_is_as_before():
    program = (
        "import os, signal\n"
        "from convjax.training.lost_process import tell_in_one_line\n"
        "end = tell_in_one_line()\n"
        "os.write(2, b'one\\n')\n"
        "end()\n"
        "os.write(2, b'two\\n')\n"
        "os.abort()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-6, "one\ntwo\n")
