"""Every kernel on the GPU at hand: is it right, and how fast beside XLA's cuDNN and cuBLAS?

    python -m experiments.benchmarks.kernels [PATTERN] [--out=FILE] [--seconds=600]

A pass of a layer (`pallas_kernels.workloads`) is first checked against XLA's result of the same
operands, then both are timed: the median over rounds that alternate, of one program that does the
pass on several sets of random operands, larger together than the GPU's cache. Beside the times
stand the floor (FLOPs and bytes at the datasheet's rates) and the ratio to XLA. The file is written
after every pass, so that what was measured is there when the time is up.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from experiments.command import OneLineParser
from pallas_kernels import Backend
from pallas_kernels.calls import Call, Pass
from pallas_kernels.inspect.roofline import GPU, GPUS, floor
from pallas_kernels.workloads import Workload, workloads

_ROUNDS = 7
_CACHE = 256 * 2**20  # bytes: several times the L2 cache of any GPU that is named here
_TOLERANCE = 1e-2  # of the norm, for 16-bit operands


@dataclass(frozen=True)
class Measurement:
    """One pass of one layer. Times are seconds for one call."""

    workload: str
    which: Pass
    error: float
    """‖kernel - XLA‖ / ‖XLA‖."""
    kernel: float
    xla: float
    floor: float
    bound: str
    teraflops: float

    @property
    def right(self) -> bool:
        return self.error <= _TOLERANCE

    def line(self) -> str:
        """The measurement in one line of text."""
        return (
            f"{self.workload:34} {self.which:16} {self.kernel * 1e6:9.1f} us "
            f"{self.teraflops:6.0f} TFLOP/s   floor {self.floor * 1e6:8.1f} us ({self.bound})   "
            f"XLA {self.xla * 1e6:9.1f} us   ratio {self.kernel / self.xla:5.2f}   "
            f"error {self.error:.1e}{'' if self.right else '   WRONG'}"
        )


def main() -> None:
    """Measure what the command asks for."""
    parser = OneLineParser(__doc__ or "")
    parser.add_argument("pattern", nargs="?", default="*", help='workloads, as "resnet50/*"')
    parser.add_argument("--out", type=Path, default=Path("kernels.json"))
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after so many")
    options = parser.parse_args()
    chosen = workloads(options.pattern)
    if not chosen:
        parser.error(f"no workload matches {options.pattern!r}; pallas_kernels.workloads has them")
    kind = jax.devices()[0].device_kind
    gpu = next((gpu for gpu in GPUS.values() if gpu.device_kind == kind), None)
    if gpu is None:
        known = ", ".join(gpu.device_kind for gpu in GPUS.values())
        parser.error(f"the device is {kind!r}, and this times kernels on one of: {known}")
    found = _measure_all(chosen, gpu, options.out, deadline=time.monotonic() + options.seconds)
    wrong = [each for each in found if not each.right]
    ratio = statistics.geometric_mean(each.kernel / each.xla for each in found) if found else 0.0
    passes = sum(len(each.call.passes) for each in chosen)
    print(
        f"{len(found)} of {passes} passes on {kind}: geometric mean of kernel / XLA {ratio:.2f}; "
        f"{len(wrong)} wrong; all in {options.out}"
    )
    raise SystemExit(bool(wrong))


def _measure_all(
    chosen: list[Workload], gpu: GPU, out: Path, *, deadline: float
) -> list[Measurement]:
    found: list[Measurement] = []
    for workload in chosen:
        for which in workload.call.passes:
            if time.monotonic() > deadline:
                return found
            found.append(measure(workload, which, gpu))
            print(found[-1].line(), flush=True)
            record = {
                "device": gpu.device_kind,
                "jax": jax.__version__,
                "measurements": [asdict(each) for each in found],
            }
            part = out.with_name(out.name + ".part")
            part.write_text(json.dumps(record, indent=1) + "\n")
            part.replace(out)
    return found


def measure(
    workload: Workload,
    which: Pass,
    gpu: GPU,
    *,
    kernel: Backend = "triton",
    cache: int = _CACHE,
    rounds: int = _ROUNDS,
) -> Measurement:
    """Checks and times one pass by `kernel` and by XLA, on operands larger than `cache` bytes."""
    call = workload.call
    flops, moved = call.work(which)
    sets = min(16, -(-cache // moved))
    programs = {backend: _program(call, which, backend, sets) for backend in (kernel, "xla")}
    error = _distance(*(programs[backend]()[0] for backend in (kernel, "xla")))
    seconds: dict[str, list[float]] = {backend: [] for backend in programs}
    for _ in range(rounds):
        for backend, program in programs.items():
            started = time.perf_counter()
            jax.block_until_ready(program())
            seconds[backend].append((time.perf_counter() - started) / sets)
    medians = {backend: statistics.median(times) for backend, times in seconds.items()}
    product = "operands" if call.is_product else "ieee"
    least = floor(gpu, product, flops=flops, bytes_moved=moved)
    return Measurement(
        workload.name,
        which,
        error,
        medians[kernel],
        medians["xla"],
        least.seconds,
        least.bound,
        flops / medians[kernel] / 1e12,
    )


def _distance(ours: Any, theirs: Any) -> float:
    """The largest ‖ours - theirs‖ / ‖theirs‖ of the arrays of two results."""

    def norm(x: Array) -> Array:
        return jnp.linalg.norm(x.astype(jnp.float32).ravel())

    each = jax.tree.map(
        lambda x, y: norm(x.astype(jnp.float32) - y.astype(jnp.float32)) / norm(y), ours, theirs
    )
    return float(max(jax.tree.leaves(each)))


def _program(call: Call, which: Pass, backend: Backend, sets: int) -> Callable[[], list[Any]]:
    """A compiled program that does the pass on `sets` sets of operands, any backend's the same."""
    function, names = call.function(backend=backend), call.differentiated(which)
    inputs: list[Any] = []
    for index in range(sets):
        operands = _random(jax.random.key(index), call.operands())
        if which == "forward":
            inputs.append(operands)
            continue
        rest = {name: array for name, array in operands.items() if name not in names}
        of = {name: operands[name] for name in names}
        y, pull = jax.vjp(lambda of, rest=rest: function(**rest, **of), of)
        inputs.append((pull, jax.random.normal(jax.random.key(sets + index), y.shape, y.dtype)))

    def run(inputs: list[Any]) -> list[Any]:
        if which == "forward":
            return [function(**operands) for operands in inputs]
        return [pull(dy) for pull, dy in inputs]

    return partial(jax.jit(run).lower(inputs).compile(), inputs)


def _random(key: Array, shapes: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
    """Normal numbers; and whole ones, of which the only ones are labels, as classes 0 and 1."""

    def draw(key: Array, shape: jax.ShapeDtypeStruct) -> Array:
        if jnp.issubdtype(shape.dtype, jnp.integer):
            return jax.random.randint(key, shape.shape, 0, 2, shape.dtype)
        return jax.random.normal(key, shape.shape, shape.dtype)

    keys = jax.random.split(key, len(shapes))
    return {name: draw(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


if __name__ == "__main__":
    main()
