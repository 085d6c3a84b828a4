"""Occupancy on cases that `cuda_occupancy.h` decides."""

import pytest

from pallas_kernels.inspect.architectures import ARCHITECTURES, occupancy


@pytest.mark.parametrize(
    ("name", "warps", "registers", "shared_bytes", "blocks", "fraction", "limit"),
    [
        ("sm_90", 8, 255, 0, 1, 0.125, "registers"),
        ("sm_90", 4, 64, 0, 8, 0.5, "registers"),
        # 163 registers are handed out as 168: 3 warps a scheduler.
        ("sm_90", 4, 163, 0, 3, 0.1875, "registers"),
        ("sm_90", 16, 255, 0, 0, 0.0, "registers"),
        ("sm_90", 8, 128, 147_456, 1, 0.125, "shared memory"),
        ("sm_90", 4, 32, 227 * 1024, 1, 0.0625, "shared memory"),
        ("sm_90", 4, 32, 228 * 1024, 0, 0.0, "shared memory"),
        ("sm_80", 4, 32, 64 * 1024, 2, 0.125, "shared memory"),
        ("sm_80", 1, 16, 0, 32, 0.5, "blocks"),
        ("sm_89", 8, 32, 0, 6, 1.0, "warps"),
        ("sm_89", 1, 16, 0, 24, 0.5, "blocks"),
        ("sm_89", 8, 64, 99 * 1024, 1, 1 / 6, "shared memory"),
    ],
)
def test_what_fills_a_multiprocessor(name, warps, registers, shared_bytes, blocks, fraction, limit):
    found = occupancy(
        ARCHITECTURES[name], warps=warps, registers=registers, shared_bytes=shared_bytes
    )
    assert (found.blocks, found.fraction, found.limit) == (blocks, fraction, limit)


@pytest.mark.parametrize(("columns", "blocks"), [(512, 1), (256, 2), (32, 16)])
def test_blackwell_shares_its_tensor_memory(columns, blocks):
    found = occupancy(
        ARCHITECTURES["sm_100"], warps=4, registers=32, shared_bytes=0, tensor_columns=columns
    )
    assert found.blocks == blocks


@pytest.mark.parametrize(
    ("name", "kibibytes"), [("sm_80", 163), ("sm_89", 99), ("sm_90", 227), ("sm_100", 227)]
)
def test_a_block_has_all_shared_memory_but_one_kibibyte(name, kibibytes):
    for over, blocks in ((0, 1), (1, 0)):
        size = kibibytes * 1024 + over
        found = occupancy(ARCHITECTURES[name], warps=4, registers=32, shared_bytes=size)
        assert (found.blocks, found.limit) == (blocks, "shared memory")
