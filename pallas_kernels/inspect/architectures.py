"""What a multiprocessor of each architecture has, and how many blocks of a kernel fit on it.

Limits: NVIDIA, "CUDA C++ Programming Guide", technical specifications per compute capability. The
arithmetic of `occupancy` is that of `cuda_occupancy.h`, which comes with CUDA.
"""

from dataclasses import dataclass
from typing import NamedTuple

_KIB = 1024
_REGISTERS = 65_536
"""32-bit registers of a multiprocessor: those of all architectures here."""
_SCHEDULERS = 4
_REGISTER_UNIT = 256
"""Registers are handed out to a warp in this many at a time."""
_RESERVED = 1 * _KIB
"""Bytes of shared memory that the driver keeps of each block."""
_TENSOR_MEMORY = 512
"""Columns of tensor memory, where there is any."""


@dataclass(frozen=True)
class Architecture:
    """A compute capability, and the limits of its multiprocessors."""

    name: str
    warps: int
    blocks: int
    shared_bytes: int
    """Of a multiprocessor; a block can have all of it but what is reserved."""
    matrix_macs: int
    """16-bit multiply-adds a cycle at which `issue_slots_per_matrix_cycle` takes the Tensor Cores
    to run. tf32 runs at half of it and 8-bit types at twice."""

    @property
    def capability(self) -> int:
        """90 for sm_90."""
        return int(self.name.removeprefix("sm_"))


# Multiply-adds: sm_80, 1,024 (A100: 312 TFLOP/s / 108 multiprocessors / 1.41 GHz / 2). sm_89, 512,
# of which GeForce cards have half with float32 accumulators. Hopper's 989 TFLOP/s / 132 / 1.83 GHz
# are 4,096 operations, 2,048 multiply-adds, and Blackwell's 2,250 / 148 / 1.86 GHz are twice that.
# For both the yardstick counts the operations: it asks twice as much of the addressing code as the
# Tensor Cores need, and is the one that the project's tables are measured with.
ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("sm_80", warps=64, blocks=32, shared_bytes=164 * _KIB, matrix_macs=1024),
        Architecture("sm_89", warps=48, blocks=24, shared_bytes=100 * _KIB, matrix_macs=512),
        Architecture("sm_90", warps=64, blocks=32, shared_bytes=228 * _KIB, matrix_macs=4096),
        Architecture("sm_100", warps=64, blocks=32, shared_bytes=228 * _KIB, matrix_macs=8192),
    )
}


class Occupancy(NamedTuple):
    """How full a multiprocessor is of a kernel's blocks."""

    blocks: int
    fraction: float
    """Resident warps of the most that there can be."""
    limit: str
    """What keeps another block out."""


def occupancy(
    architecture: Architecture,
    *,
    warps: int,
    registers: int,
    shared_bytes: int,
    tensor_columns: int = 0,
) -> Occupancy:
    """How many blocks of a kernel fit on a multiprocessor at one time.

    Args:
      architecture: the multiprocessor's.
      warps: of a block.
      registers: of a thread.
      shared_bytes: of a block.
      tensor_columns: of a block, in tensor memory.
    """
    warp_registers = -(-registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    warps_with_registers = _REGISTERS // _SCHEDULERS // max(warp_registers, 1) * _SCHEDULERS
    room = {
        "warps": architecture.warps // warps,
        "registers": warps_with_registers // warps,
        "shared memory": architecture.shared_bytes // (shared_bytes + _RESERVED),
        "blocks": architecture.blocks,
    }
    if tensor_columns:
        room["tensor memory"] = _TENSOR_MEMORY // tensor_columns
    limit = min(room, key=lambda name: room[name])
    return Occupancy(room[limit], room[limit] * warps / architecture.warps, limit)
