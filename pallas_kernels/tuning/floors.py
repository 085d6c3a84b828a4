"""The least time that this device can take for a pass: its FLOPs and its bytes at the best rates.

A GPU's rates are its datasheet's. A CPU's are measured here, in a second: a matrix product for its
arithmetic and a copy for its memory.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.calls import Call, Pass
from pallas_kernels.inspect.roofline import GPUS, floor
from pallas_kernels.launch import product


def floor_seconds(call: Call, which: Pass, device_kind: str) -> float | None:
    """The floor of a pass; None on a device whose rates are not known."""
    flops, moved = call.work(which)
    for gpu in GPUS.values():
        if gpu.device_kind == device_kind:
            made_by = product(jnp.dtype(call.dtype), None) if call.is_product else "ieee"
            return floor(gpu, made_by, flops=flops, bytes_moved=moved).seconds
    if not device_kind.startswith("cpu"):
        return None
    flop_rate, byte_rate = _processor_rates()
    return max(flops / flop_rate, moved / byte_rate)


@functools.cache
def _processor_rates() -> tuple[float, float]:
    """(float32 FLOPs, bytes) a second."""
    side, length = 1536, 2**25
    a, x = (jax.device_put(np.ones(shape, np.float32)) for shape in ((side, side), length))
    multiply = jax.jit(jnp.matmul).lower(a, a).compile()
    copy = jax.jit(lambda x: x + 1).lower(x).compile()
    return 2 * side**3 / _seconds(multiply, a, a), 2 * 4 * length / _seconds(copy, x)


def _seconds(function: Callable[..., Any], *arguments: Any) -> float:
    times = []
    for _ in range(7):
        started = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - started)
    return min(times)
