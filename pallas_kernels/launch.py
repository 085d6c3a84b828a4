"""Backends and platforms: the only module that knows which lowerings there are.

An operation asks two questions here. `resolve`: which backend runs this call? `platform`: which
hardware is this trace for? Both are answered when the operation is called, never at import.
"""

from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

import jax

Backend = Literal["auto", "xla", "triton", "interpret"]


def resolve(
    operation: str, backend: str, *, available: Sequence[Backend], blocks: Any = None
) -> Backend:
    """The backend, one of `available`, that runs `operation`.

    "auto" is the first of `available`; any other name is taken at its word.

    Raises:
      ValueError: `backend` is no backend's name, or `blocks` are given to XLA, which has none.
      NotImplementedError: `operation` has no such backend.
    """
    names = get_args(Backend)
    if backend not in names:
        raise ValueError(f"backend={backend!r} must be one of {', '.join(map(repr, names))}")
    chosen = available[0] if backend == "auto" else cast(Backend, backend)
    if chosen not in available:
        there = ", ".join(map(repr, available))
        raise NotImplementedError(f"{operation} has no backend {chosen!r}; it has {there}")
    if chosen == "xla" and blocks is not None:
        raise ValueError(f"blocks={blocks!r} must be None with backend='xla': XLA has no blocks")
    return chosen


def platform() -> str:
    """The hardware of this trace, "cpu", "gpu" or "tpu": the mesh in use, else JAX's default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = jax.default_backend() if device is None else device.platform
    return {"cuda": "gpu", "rocm": "gpu"}.get(name, name)
