"""The kernels' benchmark, which needs a GPU, run on a CPU with the interpreter in its place."""

import subprocess
import sys

import jax
import pytest

from experiments.benchmarks.kernels import Measurement, measure
from pallas_kernels.calls import Conv2d, Matmul
from pallas_kernels.inspect.roofline import GPUS
from pallas_kernels.workloads import Workload

CALLS = {
    "conv2d": Conv2d((2, 5, 5, 3), (3, 3, 3, 4), strides=(2, 2), bias=True, activation="relu"),
    "matmul": Matmul((7, 5), (5, 3), bias=True, activation="gelu"),
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
