"""Several processes meet, agree and end together; which environments have several."""

import socket
import subprocess
import sys

import pytest

from convjax.training.errors import ConfigError
from convjax.training.processes import agreed, are_several, check_same, exchange, is_first, leave

SLURM = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
OPEN_MPI = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911"}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.mark.parametrize(
    ("environ", "several"),
    [
        ({}, False),
        (SLURM, False),  # a batch script's own commands, of which each runs once
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, False),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "4"}, True),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, False),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, False),  # Open MPI 5, which jax does not know
        (KUBERNETES, False),
        (KUBERNETES | {"JOB_COMPLETION_INDEX": "0"}, False),  # without jax's extra
    ],
)
def test_environments(environ, several):
    assert are_several(environ) == several


def test_kubernetes_needs_its_package(monkeypatch):
    monkeypatch.setattr("convjax.training.processes.find_spec", lambda name: name == "kubernetes")
    assert are_several(KUBERNETES | {"JOB_COMPLETION_INDEX": "0"})
    assert not are_several(KUBERNETES)


def test_one_process_agrees_with_itself():
    assert exchange("a\n") == ["a\n"]
    assert exchange("") == [""]
    assert is_first()
    assert leave(3) == 3
    check_same({"seed": 1, "data": {"name": "x"}})
    with pytest.raises(ConfigError, match=r"^no$") as caught, agreed():
        raise ConfigError("no")
    assert not caught.value.agreed


PROGRAM = """
import sys, time
from convjax.training.errors import ConfigError, DamagedError, RunError
from convjax.training.processes import agreed, check_same, exchange, is_first, joined, leave
from experiments.command import end_with

def refused(what):
    try:
        with agreed():
            what()
    except Exception as error:
        print(type(error).__name__, error.agreed, error)

def damaged():
    if number == 1:
        raise DamagedError("bad")

def missing():
    open("none")

def run():
    with joined(sys.argv[1], 2, number):
        print(is_first(), exchange("ä" * 600 * number) == ["", "ä" * 600])
        refused(damaged)
        refused(missing)
        refused(lambda: check_same({"seed": number, "mesh": {"data": 1}}))
        with agreed():
            if number == 1:
                raise ConfigError("seed=-1 must be in [0, 2**32)")

number = int(sys.argv[2])
sys.exit(leave(end_with(run)))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def test_two_processes_agree():
    command = [sys.executable, "-c", PROGRAM, f"localhost:{free_port()}"]
    running = [
        subprocess.Popen(
            [*command, number], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for number in "01"
    ]
    ends = [process.communicate(timeout=120) for process in running]
    for number, (output, errors) in enumerate(ends):
        lines = [line for line in output.splitlines() if not line.startswith("[Gloo]")]
        assert lines == [
            f"{number == 0} True",
            "DamagedError True process 1: bad",
            "RunError True [Errno 2] No such file or directory: 'none'",
            "ConfigError True process 1: other values of seed than in process 0",
        ]
        assert errors == "error: process 1: seed=-1 must be in [0, 2**32)\n"
    assert [process.returncode for process in running] == [2, 2]
