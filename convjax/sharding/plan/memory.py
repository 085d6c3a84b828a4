"""What one device holds in memory during a training step."""

from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from jaxtyping import PyTree

from convjax.sharding.activations import activation_bytes
from convjax.sharding.program import Program
from convjax.training.state import TrainState


@dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    Attributes:
      parameters: of the network.
      statistics: of its batch norms.
      optimiser: what it remembers, and the step's number.
      batch: images and labels of a step.
      activations: what the forward pass keeps for the backward pass (`activation_bytes`).
      temporaries: all else that XLA allocates: gradients, workspaces, what lives shortly.
      total: of the above.
    """

    parameters: int
    statistics: int
    optimiser: int
    batch: int
    activations: int
    temporaries: int
    total: int


def memory_of(
    compiled: jax.stages.Compiled, program: Program, state: TrainState, batch: PyTree
) -> Memory:
    """What the compiled step needs of one device.

    Args:
      compiled: the step.
      program: the same, parsed.
      state: shapes with shardings, as the step takes it.
      batch: shapes with shardings, as the step takes it.
    """
    stats: Any = compiled.memory_analysis()
    # What is donated is counted once: its buffers hold the new state.
    total = (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )
    parts = {
        "parameters": device_bytes(state.params),
        "statistics": device_bytes(state.batch_stats),
        "optimiser": device_bytes((state.opt_state, state.step)),
        "batch": device_bytes(batch),
    }
    left = max(0, total - sum(parts.values()))
    activations = min(left, activation_bytes(program))
    return Memory(**parts, activations=activations, temporaries=left - activations, total=total)


def device_bytes(shapes: PyTree) -> int:
    """Bytes on one device of arrays of these shapes, dtypes and shardings."""
    return sum(map(_device_bytes, jax.tree.leaves(shapes)))


def _device_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return prod(shape) * leaf.dtype.itemsize
