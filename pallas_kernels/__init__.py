"""Operations of vision networks as pure functions of arrays.

Each is one file, read from top to bottom: what it computes and what it costs, a reference in plain
jnp, the public function. Start with `cross_entropy` and `matmul`; `epilogue` is what `matmul` and
`conv2d` do to a product before they write it. Then `windows`, `max_pool`, `conv2d` and
`conv2d_algorithms`. `launch` knows the backends and the hardware, and no operation does.
"""

from pallas_kernels.conv2d import conv2d
from pallas_kernels.conv2d_algorithms import Algorithm
from pallas_kernels.cross_entropy import cross_entropy
from pallas_kernels.epilogue import Activation
from pallas_kernels.launch import Backend
from pallas_kernels.matmul import matmul
from pallas_kernels.max_pool import max_pool
from pallas_kernels.windows import Padding

__all__ = [
    "Activation",
    "Algorithm",
    "Backend",
    "Padding",
    "conv2d",
    "cross_entropy",
    "matmul",
    "max_pool",
]
