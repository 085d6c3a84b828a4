"""Links between devices: how many bytes a collective sends over them, and how long that takes.

Ring algorithms move the least that each device must send, and so give the least time of a link that
every device has for itself. Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", JPDC 69(2), 2009. Latency is not counted, nor that several devices may
share a link.
"""

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal[
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
]
"""Collectives by XLA's names."""

KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Link:
    """What joins a device to the others.

    Attributes:
      name: as on the box.
      bandwidth: bytes a second in one direction, after the line code.
    """

    name: str
    bandwidth: float

    def seconds(self, sent: int) -> float:
        """The least time in which each device sends, and receives, `sent` bytes."""
        return sent / self.bandwidth


# PCI-SIG, base specifications 2.0 (5 GT/s a lane, 8b/10b) and 5.0 (32 GT/s a lane, 128b/130b).
# NVIDIA H100 Tensor Core GPU Architecture, 2022: 18 links of 25 GB/s each way.
LINKS = (
    Link("PCIe 2.0 x16", 16 * 5e9 / 8 * 8 / 10),
    Link("PCIe 5.0 x16", 16 * 32e9 / 8 * 128 / 130),
    Link("NVLink 4", 18 * 25e9),
)


def bytes_sent(kind: Kind, size: int, devices: int) -> int:
    """The bytes that one of `devices` sends in a collective; it receives as many.

    Args:
      kind: the collective.
      size: bytes that each device puts in: its shard for an all-gather, else all of its array.
      devices: how many take part in one group.
    """
    match kind:
        case "all-reduce":  # a reduce-scatter and an all-gather of what it gave
            return -(-2 * size * (devices - 1) // devices)
        case "all-gather":
            return size * (devices - 1)
        case "reduce-scatter" | "all-to-all" | "ragged-all-to-all":
            return -(-size * (devices - 1) // devices)
        case "collective-permute" | "collective-broadcast":
            return size
