"""Operations of vision networks as pure functions of arrays.

Each is one file, read from top to bottom: what it computes and what it costs, a reference in plain
jnp, the kernels, the public function. Start with `cross_entropy`, then `matmul`: its kernel is the
pattern of the others. It stands on `blocks` (sizes), `tiles` (what a block of threads reads and
writes), `epilogue` (what happens to a product before it is written), `transformations` (grad, vmap
and meshes) and `launch`, which knows backends, hardware and versions of jax, as no operation does.

Convolution is `conv2d`. XLA's ways to do it are in `conv2d_algorithms`, the kernels in
`implicit_gemm` and `direct_chwn`, over `windows` and `taps` (which pixels see which), and
`conv2d_kernels` ties these together. `workloads` has real shapes; `inspect` shows what the compiler
makes of them.
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
from pallas_kernels.local_response_norm import local_response_norm
from pallas_kernels.matmul import matmul
from pallas_kernels.matmul_fp8 import matmul_fp8
from pallas_kernels.max_pool import max_pool
from pallas_kernels.tuning.search import autotune, tune
from pallas_kernels.windows import Padding

__all__ = [
    "Activation",
    "Algorithm",
    "Backend",
    "Blocks",
    "Padding",
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
    "tune",
]
