"""Flax Linen modules and functions over `pallas_kernels`: what every model here is made of.

`Conv` and `Dense` hold a kernel and a bias and call one operation; `BatchNorm` holds running
statistics; pooling has no parameters, so it is plain functions.
"""

from convjax.layers.conv import Conv
from convjax.layers.dense import Dense
from convjax.layers.norm import BatchNorm, BatchNormConvention
from convjax.layers.padding import Padding
from convjax.layers.pool import avg_pool, global_avg_pool, max_pool

__all__ = [
    "BatchNorm",
    "BatchNormConvention",
    "Conv",
    "Dense",
    "Padding",
    "avg_pool",
    "global_avg_pool",
    "max_pool",
]
