"""Flax Linen modules and functions over `pallas_kernels`: what every model here is made of.

`Conv` and `Dense` hold a kernel and a bias and call one operation; `BatchNorm` holds running
statistics; pooling has no parameters, so it is plain functions.
"""

from convjax.layers.attention import CrossAttention, SelfAttention
from convjax.layers.conv import Conv
from convjax.layers.dense import Dense
from convjax.layers.dropout import Dropout, drop_branch, noise_key
from convjax.layers.initialisers import (
    Initialiser,
    constant,
    normal,
    ones,
    truncated_normal,
    uniform,
    variance_scaling,
    zeros,
)
from convjax.layers.layer_norm import LayerNorm
from convjax.layers.norm import BatchNorm, BatchNormConvention
from convjax.layers.padding import Padding
from convjax.layers.pool import adaptive_avg_pool, avg_pool, global_avg_pool, max_pool
from convjax.layers.positions import resize_positions, sincos_positions
from convjax.layers.response_norm import pixel_response_norm
from convjax.layers.stack import Remat, stack

__all__ = [
    "BatchNorm",
    "BatchNormConvention",
    "Conv",
    "CrossAttention",
    "Dense",
    "Dropout",
    "Initialiser",
    "LayerNorm",
    "Padding",
    "Remat",
    "SelfAttention",
    "adaptive_avg_pool",
    "avg_pool",
    "constant",
    "drop_branch",
    "global_avg_pool",
    "max_pool",
    "noise_key",
    "normal",
    "ones",
    "pixel_response_norm",
    "resize_positions",
    "sincos_positions",
    "stack",
    "truncated_normal",
    "uniform",
    "variance_scaling",
    "zeros",
]
