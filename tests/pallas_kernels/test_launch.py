"""Backends by name and the platform of a trace."""

import subprocess
import sys

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels import Blocks, launch


def test_auto_is_the_first_that_is_there():
    assert launch.resolve("f", "auto", available=("triton", "xla")) == "triton"
    assert launch.resolve("f", "xla", available=("triton", "xla")) == "xla"


def test_a_named_backend_that_is_not_there_is_never_replaced():
    with pytest.raises(NotImplementedError, match="f has no backend 'interpret'; it has 'xla'"):
        launch.resolve("f", "interpret", available=("xla",))


def test_an_unknown_backend_is_answered_with_the_known_ones():
    with pytest.raises(
        ValueError, match="'mps' must be one of 'auto', 'xla', 'triton', 'interpret'"
    ):
        launch.resolve("f", "mps", available=("xla",))


def test_xla_has_no_blocks():
    with pytest.raises(ValueError, match="blocks=128 must be None with backend='xla'"):
        launch.resolve("f", "auto", available=("xla",), blocks=128)


def test_kernels_have_blocks_and_no_bare_numbers():
    sizes = Blocks(16, 16, 16)
    assert launch.resolve("f", "triton", available=("xla", "triton"), blocks=sizes) == "triton"
    with pytest.raises(TypeError, match=r"blocks=128 must be pallas_kernels\.Blocks"):
        launch.resolve("f", "triton", available=("xla", "triton"), blocks=128)


def test_platform_is_the_default_backend_without_a_mesh():
    assert launch.platform() == "cpu"


@pytest.mark.parametrize(
    ("device", "expected"), [("cuda", "gpu"), ("rocm", "rocm"), ("tpu", "tpu"), ("cpu", "cpu")]
)
def test_platform_is_that_of_the_mesh_in_use(device, expected):
    abstract = AbstractDevice(device_kind="some", num_cores=None, platform=device)
    mesh = AbstractMesh((1,), ("data",), (AxisType.Auto,), abstract_device=abstract)
    seen = []
    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(lambda: seen.append(launch.platform()))
    assert seen == [expected]


def test_importing_touches_no_device():
    code = (
        "import pallas_kernels; from jax._src import xla_bridge; "
        "raise SystemExit(xla_bridge.backends_are_initialized())"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
