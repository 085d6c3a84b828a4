"""How a matrix product, or a convolution that is one, is cut into tiles."""

from dataclasses import dataclass


def ceiling(value: int, divisor: int) -> int:
    """value / divisor, rounded up."""
    return -(-value // divisor)


def side(extent: int, largest: int) -> int:
    """The side of a tile that covers `extent`: the next power of two, from 16 to `largest`."""
    return min(max(16, 1 << (max(extent, 1) - 1).bit_length()), largest)


@dataclass(frozen=True)
class Blocks:
    """A block of threads makes an m×n tile of the output, k products of each element at a time.

    Raises:
      ValueError: m, n or k is not a power of two from 16 on, `warps` not 1, 2, 4, 8 or 16, one of
        the others below 1, or all together more than any GPU has room for.
      TypeError: one of them is no int.
    """

    m: int
    n: int
    k: int
    warps: int = 4
    """Groups of 32 threads."""
    stages: int = 3
    """Tiles of the operands on their way to the Tensor Cores at one time."""
    splits: int = 1
    """Parts of the sum over k that different blocks make; they are added in a fixed order."""
    group: int = 8
    """Rows of tiles that are finished before the next, so that they find b in the L2 cache."""

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "warps", "stages", "splits", "group"):
            if type(getattr(self, name)) is not int:
                raise TypeError(f"{name}={getattr(self, name)!r} must be a whole number")
        for name in ("m", "n", "k"):
            size = getattr(self, name)
            # Triton's tensors have powers of two, and a Tensor Core takes at least 16.
            if size < 16 or size & (size - 1):
                raise ValueError(f"blocks of {name}={size} must be a power of two from 16 on")
        if self.warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"warps={self.warps} must be 1, 2, 4, 8 or 16")
        for name in ("stages", "splits", "group"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        sums = self.m * self.n // (32 * self.warps)
        if sums > 256 or self.k > 256 or self.stages > 8:
            raise ValueError(
                f"blocks of {self.m}×{self.n}×{self.k} with warps={self.warps} and "
                f"stages={self.stages} fit no GPU: a thread can have 256 sums (here {sums}), k can "
                "be 256, and stages 8"
            )
