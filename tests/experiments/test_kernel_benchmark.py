"""The kernels' benchmark, which needs a GPU, run on a CPU with the interpreter in its place."""

import json
import subprocess
import sys
from dataclasses import replace

import jax
import pytest

from experiments.benchmarks import kernels
from experiments.benchmarks.kernels import Measurement, measure
from pallas_kernels.calls import Conv2d, CrossEntropy, Matmul, MaxPool
from pallas_kernels.inspect.roofline import GPUS
from pallas_kernels.workloads import Workload

CALLS = {
    "conv2d": Conv2d((2, 5, 5, 3), (3, 3, 3, 4), strides=(2, 2), bias=True, activation="relu"),
    "matmul": Matmul((7, 5), (5, 3), bias=True, activation="gelu"),
    "max_pool": MaxPool((2, 5, 5, 3)),
    "cross_entropy": CrossEntropy((4, 5)),
}


@pytest.mark.parametrize(
    ("name", "which"), [(name, which) for name, call in CALLS.items() for which in call.passes]
)
def test_a_right_kernel_is_found_right(name, which):
    workload = Workload("test", name, "", CALLS[name])
    found = measure(workload, which, GPUS["H200"], kernel="interpret", cache=1, rounds=1)
    assert found.right
    assert found.error < 5e-3
    assert min(found.kernel, found.xla, found.floor) > 0
    assert found.line().startswith(f"test/{name}")


def test_a_wrong_one_says_so():
    wrong = Measurement("w", "forward", 0.5, 1e-3, 1e-3, 1e-4, "memory", 1.0)
    assert not wrong.right
    assert wrong.line().endswith("WRONG")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so_in_one_line():
    command = [sys.executable, "-m", "experiments.benchmarks.kernels", "alexnet/conv1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "the device is 'cpu'" in done.stderr


def test_the_command_ends_with_what_was_measured(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(kernels, "GPUS", {"cpu": replace(GPUS["H200"], device_kind="cpu")})
    done = Measurement("w", "forward", 1e-3, 1e-3, 2e-3, 1e-4, "memory", 1.0)
    monkeypatch.setattr(kernels, "measure", lambda *_: done)
    out = tmp_path / "kernels.json"
    monkeypatch.setattr(sys, "argv", ["kernels", "alexnet/pool1", f"--out={out}"])
    with pytest.raises(SystemExit) as end:
        kernels.main()
    assert end.value.code == 0
    said = "2 of 2 passes on cpu: geometric mean of kernel / XLA 0.50; 0 wrong"
    assert said in capsys.readouterr().out
    assert len(json.loads(out.read_text())["measurements"]) == 2
