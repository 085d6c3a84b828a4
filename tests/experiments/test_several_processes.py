"""AlexNet's towers in two processes: one is killed, and a single one goes on to the same end."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from convjax.training.checkpoint import read_checkpoint, saved_steps
from convjax.training.parts import assemble
from convjax.training.workdir import Workdir

ROOT = Path(__file__).parents[2]
STEPS = 10
CONFIG = f"""
from ml_collections import ConfigDict

def get_config():
    fields = {{"widths": (4, 8, 8, 8, 8), "dense_width": 16, "kernel_stddev": 0.1}}
    return ConfigDict({{
        "model": {{"name": "alexnet", "fields": fields | {{"stem_size": 5, "stem_strides": 1}}}},
        "data": {{
            "name": "fashion_mnist_small", "batch_size": 8, "test_batch_size": 500,
            "mean": (0.286,), "std": (0.353,),
        }},
        "optimiser": {{"learning_rate": 0.01}},
        "steps": {STEPS}, "log_every_steps": 1, "checkpoint_every_steps": 2,
        "keep_checkpoints": {STEPS},
    }})
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "config.py"
    path.write_text(CONFIG)
    return path


def start(config: Path, workdir: Path, *options: str, devices: int = 1) -> subprocess.Popen:
    command = [sys.executable, "-m", "experiments.train", f"--config={config}"]
    environ = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)}
    return subprocess.Popen(
        [*command, f"--workdir={workdir}", *options],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_two(config: Path, workdir: Path, *options: str) -> list[subprocess.Popen]:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        cluster = f"--coordinator=localhost:{probe.getsockname()[1]}", "--processes=2"
    return [
        start(config, workdir, *options, *cluster, f"--process_id={number}") for number in range(2)
    ]


def finish(*running: subprocess.Popen) -> None:
    for process in running:
        output, errors = process.communicate(timeout=600)
        assert process.returncode == 0, output + errors


def wait_for(steps: int, workdir: Path) -> None:
    end = time.monotonic() + 600
    while time.monotonic() < end:
        if len(saved_steps(workdir / "checkpoints")) >= steps:
            return
        time.sleep(0.01)
    pytest.fail("no checkpoint")


def final_state(workdir: Path) -> dict[str, np.ndarray]:
    folder = Workdir(workdir)
    like = assemble(folder.read_config()).abstract_state()
    state, _ = read_checkpoint(folder.checkpoints, STEPS, like)
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(state)
    }


def losses(workdir: Path) -> list[float]:
    records = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def test_two_processes_are_one_with_two_devices_to_the_bit(config, tmp_path):
    finish(*start_two(config, tmp_path / "two", "--config.mesh.data=2"))
    finish(start(config, tmp_path / "one", "--config.mesh.data=2", devices=2))
    two, one = final_state(tmp_path / "two"), final_state(tmp_path / "one")
    assert {name: leaf.tobytes() for name, leaf in two.items()} == {
        name: leaf.tobytes() for name, leaf in one.items()
    }
    assert losses(tmp_path / "two") == losses(tmp_path / "one")


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """The folder of a run of one process on one device."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    finish(start(config, workdir))
    return workdir


@pytest.mark.parametrize("lost", [0, 1])
def test_a_run_that_lost_a_process_goes_on_in_one(config, whole, tmp_path, lost):
    workdir = tmp_path / "lost"
    running = start_two(config, workdir, "--config.mesh.tower=2")
    wait_for(2, workdir)
    running[lost].send_signal(signal.SIGKILL)
    running[lost].communicate()
    began = time.monotonic()
    _, errors = running[1 - lost].communicate(timeout=60)
    print(f"process {lost} was lost: {time.monotonic() - began:.1f} s, {errors}")
    assert running[1 - lost].returncode == 1
    assert errors == (
        f"error: process {lost} is lost; the same command continues from the last checkpoint\n"
    )
    assert saved_steps(workdir / "checkpoints")[-1] < STEPS
    finish(start(config, workdir))
    expected = final_state(whole)
    for name, leaf in final_state(workdir).items():
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(losses(workdir), losses(whole), rtol=1e-5)


def test_a_signal_to_one_process_stops_both_at_a_step(config, tmp_path):
    workdir = tmp_path / "stopped"
    options = "--config.mesh.data=2", "--config.steps=100000"
    running = start_two(config, workdir, *options)
    wait_for(1, workdir)
    running[1].terminate()
    ends = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [143, 143]
    last = saved_steps(workdir / "checkpoints")[-1]
    for _, errors in ends:
        message = errors.splitlines()[-1]
        assert message.startswith(f"stopped by SIGTERM after step {last} of 100000, in {workdir}")
