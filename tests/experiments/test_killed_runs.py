"""Runs that are killed and continued end where an uninterrupted one does, to the bit."""

import json
import os
import random
import signal
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
KILLS = int(os.environ.get("CONVJAX_KILLS", "3"))
STEPS = 240
TIMINGS = {"seconds", "images_per_second"}
CONFIG = f"""
from ml_collections import ConfigDict

def get_config():
    return ConfigDict({{
        "model": {{"name": "resnet8_cifar", "fields": {{"widths": (4, 8, 8)}}}},
        "data": {{
            "name": "digits", "batch_size": 32, "mean": (0.3,), "std": (0.38,),
            "augmentation": {{"crop_padding": 1}},
        }},
        "optimiser": {{"learning_rate": 0.05, "weight_decay": 1e-4}},
        "steps": {STEPS}, "log_every_steps": 4, "checkpoint_every_steps": 9,
    }})
"""


def start(config: Path, workdir: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "experiments.train", f"--config={config}"]
    with workdir.with_suffix(".log").open("a") as log:
        return subprocess.Popen(
            [*command, f"--workdir={workdir}"], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        )


def finish(config: Path, workdir: Path) -> None:
    status = start(config, workdir).wait(timeout=600)
    assert status == 0, workdir.with_suffix(".log").read_text()


def kill_after(records: int, process: subprocess.Popen, workdir: Path) -> bool:
    """Kill the process a moment after it wrote that many records; False if it ended before."""
    metrics = workdir / "metrics.jsonl"
    while process.poll() is None:
        written = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if written >= records:
            time.sleep(random.uniform(0, 0.3))
            process.send_signal(signal.SIGKILL)
            return process.wait() == -signal.SIGKILL
        time.sleep(0.005)
    return False


def final_state(workdir: Path) -> dict[str, bytes]:
    folder = Workdir(workdir)
    assert saved_steps(folder.checkpoints)[-1] == STEPS
    like = assemble(folder.read_config()).abstract_state()
    state, _ = read_checkpoint(folder.checkpoints, STEPS, like)
    return {
        jax.tree_util.keystr(path): np.asarray(leaf).tobytes()
        for path, leaf in jax.tree.leaves_with_path(state)
    }


def records_without_timings(workdir: Path) -> list[dict[str, float]]:
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if name not in TIMINGS}
        for line in lines
    ]


@pytest.mark.slow
def test_killed_and_continued_runs_are_bit_identical(tmp_path):
    config = tmp_path / "config.py"
    config.write_text(CONFIG)
    whole = tmp_path / "whole"
    finish(config, whole)
    expected = final_state(whole), records_without_timings(whole)
    result = json.loads((whole / "result.json").read_text())
    print("seed", seed := time.time_ns())  # shown if the test fails
    random.seed(seed)
    killed = 0
    for run in range(KILLS):
        workdir = tmp_path / f"killed{run}"
        records = random.randrange(len(expected[1]))
        killed += kill_after(records, start(config, workdir), workdir)
        finish(config, workdir)
        assert (final_state(workdir), records_without_timings(workdir)) == expected, run
        again = json.loads((workdir / "result.json").read_text())
        assert again["test_accuracy"] == result["test_accuracy"]
        assert again["test_loss"] == result["test_loss"]
    assert killed > KILLS // 2
