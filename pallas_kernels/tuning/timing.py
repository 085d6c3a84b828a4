"""The time of one way to do a pass of a call, once its result was found right.

A candidate is traced as the operation itself would run it, compiled, checked against XLA's result
in float32 at the highest precision, and timed on operands that the caches do not hold.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from pallas_kernels import selection
from pallas_kernels.calls import Call, Conv2d, Matmul, Pass
from pallas_kernels.selection import Choice

CACHE = 64 * 2**20
"""Bytes of operands after which the first are in no cache any more."""

TOLERANCE = {"float32": 3e-3, "float16": 1e-2, "bfloat16": 3e-2}
"""Of the norm; float32's is that of tf32 products."""


class WrongError(RuntimeError):
    """A candidate computes something else."""


class Contender:
    """A compiled candidate and its times.

    Raises:
      WrongError: its result is not the reference's.
    """

    def __init__(self, call: Call, which: Pass, choice: Choice, bench: "Bench") -> None:
        self.choice = choice
        self.seconds: list[float] = []
        self._bench = bench
        self._next = 0
        self._run = _compile(call, which, choice, bench.sets[0])
        bench.check(self._run(*bench.sets[0]))

    def run(self) -> None:
        """Takes one more time."""
        operands = self._bench.sets[self._next % len(self._bench.sets)]
        self._next += 1
        started = time.perf_counter()
        jax.block_until_ready(self._run(*operands))
        self.seconds.append(time.perf_counter() - started)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class Bench:
    """Random operands of a pass, and its result."""

    def __init__(self, call: Call, which: Pass) -> None:
        moved = call.work(which).bytes_moved
        self._call: Call = call
        self._which: Pass = which
        self.sets = [_operands(call, which, seed) for seed in range(1 + min(15, CACHE // moved))]
        self._expected: Any = None

    def check(self, result: Any) -> None:
        """Raises WrongError if `result` is not that of the first operands."""
        if self._expected is None:
            self._expected = _reference(self._call, self._which, *self.sets[0])
        for found, expected in zip(
            jax.tree.leaves(result), jax.tree.leaves(self._expected), strict=True
        ):
            scale = float(jnp.linalg.norm(expected.ravel()))
            error = float(jnp.linalg.norm((found.astype(jnp.float32) - expected).ravel()))
            if not error <= TOLERANCE[self._call.dtype] * scale:
                raise WrongError(f"off by {error / max(scale, 1e-30):.1e} of its norm")


def race(contenders: list[Contender], *, seconds: float, rounds: int = 7) -> None:
    """Times all in turn, round by round, as long as `seconds` last; the slow drop out."""
    deadline = time.perf_counter() + seconds
    running = list(contenders)
    for _ in range(rounds):
        for contender in running:
            contender.run()
        best = min(contender.median for contender in running)
        running = [contender for contender in running if contender.median <= 1.5 * best]
        if time.perf_counter() > deadline:
            return


def _compile(
    call: Call, which: Pass, choice: Choice, operands: tuple[Any, ...]
) -> Callable[..., Any]:
    def run(arrays: dict[str, Array], dy: Array | None) -> Any:
        with selection.trying(call, which, choice):
            return _pass(call, which, arrays, dy)

    return jax.jit(run).lower(*operands).compile()


def _pass(
    call: Call, which: Pass, arrays: dict[str, Array], dy: Array | None, **options: Any
) -> Any:
    function = call.function(**options)
    if which == "forward":
        return function(**arrays)
    names = call.differentiated(which)
    rest = {name: array for name, array in arrays.items() if name not in names}
    of = {name: arrays[name] for name in names}
    y, pull = jax.vjp(lambda of: function(**rest, **of), of)
    # Passes that go together are timed together.
    return (y, pull(dy)) if which == "backward" else pull(dy)


def _reference(call: Call, which: Pass, *operands: Any) -> Any:
    """The pass by XLA's own algorithm in float32."""
    wide = jax.tree.map(
        lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, operands
    )
    options: dict[str, Any] = {"backend": "xla"}
    if call.operation == "conv2d":
        options["algorithm"] = "direct"
    if call.is_product:
        options["precision"] = lax.Precision.HIGHEST
    exact = replace(call, dtype="float32")
    if isinstance(exact, Conv2d | Matmul):
        exact = replace(exact, out_dtype=None)
    return jax.jit(partial(_pass, exact, which, **options))(*wide)


def _operands(call: Call, which: Pass, seed: int) -> tuple[dict[str, Array], Array | None]:
    """(operands, the cotangent of the result), of numbers around zero."""
    noise = _noise(seed)
    arrays = {name: _next_array(noise, x) for name, x in call.operands().items()}
    if which == "forward":
        return arrays, None
    y = jax.eval_shape(call.function(backend="xla"), **call.operands())
    return arrays, _next_array(noise, y)


def _noise(seed: int) -> Iterator[np.ndarray]:
    random = np.random.default_rng(seed)
    while True:
        yield random.standard_normal(2**16 + 1, np.float32)


def _next_array(noise: Iterator[np.ndarray], like: jax.ShapeDtypeStruct) -> Array:
    """An array of random numbers, or of zeros for labels."""
    if jnp.issubdtype(like.dtype, jnp.integer):
        return jnp.zeros(like.shape, like.dtype)
    return jax.device_put(np.resize(next(noise), like.shape)).astype(like.dtype)
