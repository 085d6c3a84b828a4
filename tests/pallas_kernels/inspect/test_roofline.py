"""Floors by hand, from the datasheets' numbers."""

import pytest

from pallas_kernels.inspect.architectures import ARCHITECTURES
from pallas_kernels.inspect.roofline import GPUS, default_gpu, floor


def test_a_large_product_is_bound_by_arithmetic():
    found = floor(GPUS["H200"], "operands", flops=2 * 4096**3, bytes_moved=3 * 2 * 4096**2)
    assert found.bound == "compute"
    assert found.seconds == pytest.approx(138.9e-6, rel=1e-3)
    assert found.intensity == pytest.approx(1365.3, rel=1e-3)
    assert found.ridge == pytest.approx(206.1, rel=1e-3)


def test_a_copy_is_bound_by_memory():
    found = floor(GPUS["H200"], "operands", flops=10**9, bytes_moved=4_800_000_000)
    assert (found.bound, found.seconds) == ("memory", pytest.approx(1e-3))


def test_float32_products_have_the_rate_of_what_they_are_made_of():
    times = {
        product: floor(GPUS["A100"], product, flops=10**15, bytes_moved=1).seconds
        for product in ("operands", "tf32", "tf32x3", "ieee")
    }
    assert times["tf32"] == pytest.approx(2 * times["operands"])
    assert times["tf32x3"] == pytest.approx(3 * times["tf32"])
    assert times["ieee"] == pytest.approx(16 * times["operands"])


@pytest.mark.parametrize(("gpu", "times"), [("A100", 1.0), ("RTX4090", 2.0), ("H200", 2.0)])
def test_8_bit_floats_have_twice_the_rate_of_16_bit_ones_where_there_are_any(gpu, times):
    narrow, wide = (
        floor(GPUS[gpu], rate, flops=10**15, bytes_moved=1).seconds for rate in ("fp8", "operands")
    )
    assert wide / narrow == pytest.approx(times, rel=1e-3)


def test_every_architecture_has_a_gpu_to_measure_it_by():
    found = {name: default_gpu(name).name for name in ARCHITECTURES}
    assert found == {"sm_80": "A100", "sm_89": "RTX4090", "sm_90": "H200", "sm_100": "B200"}


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_a_gpu_is_of_an_architecture_that_is_there(gpu):
    assert gpu.architecture in ARCHITECTURES
