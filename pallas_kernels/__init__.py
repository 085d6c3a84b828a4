"""Operations of vision networks as pure functions of arrays.

Each is one file, read from top to bottom: what it computes and what it costs, a reference in plain
jnp, the kernels, the public function; where that is more than a file holds, the kernels are next
door in `…_kernels`. Start with `matmul`: its kernel is the pattern of the others. It stands on
`blocks` (sizes), `tiles` (what a block of threads reads and writes), `epilogue` (what happens to a
product before it is written), `transformations` (grad, vmap and meshes) and `launch`, which knows
backends, hardware and versions of jax, as no operation does.

Convolution is `conv2d`: `conv2d_xla` and `conv2d_algorithms` have XLA's ways to do it;
`conv2d_kernels` chooses among the kernels `implicit_gemm` and `direct_chwn`, and `conv2d_passes`
has their passes and derivatives, over `windows` and `taps` (which pixels see which). `matmul_fp8`
and `float8` are products in 8 bits.

`calls` are calls as values, `workloads` those of real networks. `inspect` shows what the compiler
makes of them, `tuning` which way is the fastest, and `selection` tells the operations.
"""

from pallas_kernels.attention import attention
from pallas_kernels.blocks import Blocks
from pallas_kernels.conv2d import conv2d, conv2d_transpose
from pallas_kernels.conv2d_algorithms import Algorithm
from pallas_kernels.cross_entropy import cross_entropy
from pallas_kernels.epilogue import Activation
from pallas_kernels.float8 import ScaleState
from pallas_kernels.launch import Backend
from pallas_kernels.layer_norm import layer_norm
from pallas_kernels.local_response_norm import Convention as ResponseNormConvention
from pallas_kernels.local_response_norm import local_response_norm
from pallas_kernels.matmul import matmul
from pallas_kernels.matmul_fp8 import matmul_fp8
from pallas_kernels.max_pool import max_pool, max_pool_with_switches, max_unpool
from pallas_kernels.tuning.search import autotune, tune
from pallas_kernels.windows import Padding

__all__ = [
    "Activation",
    "Algorithm",
    "Backend",
    "Blocks",
    "Padding",
    "ResponseNormConvention",
    "ScaleState",
    "attention",
    "autotune",
    "conv2d",
    "conv2d_transpose",
    "cross_entropy",
    "layer_norm",
    "local_response_norm",
    "matmul",
    "matmul_fp8",
    "max_pool",
    "max_pool_with_switches",
    "max_unpool",
    "tune",
]
