"""How long a training step of 1,202 layers takes to compile, beside one of 110.

    python -m experiments.benchmarks.compile_time [SHORTER DEEPER]

The equal blocks of a stage share one scan, so the two programs are the same but for the length of
their loops. The goal is a ratio of at most 1.5. Rounds alternate, and medians are compared.
"""

import statistics
import time

import jax
import numpy as np

from convjax import create_model, list_models
from convjax.data import Batch
from convjax.training.config import OptimiserConfig, ScheduleConfig
from convjax.training.optimiser import make_optimiser, make_schedule
from convjax.training.state import abstract_state
from convjax.training.step import make_train_step
from experiments.command import OneLineParser

_ROUNDS = 3
_BATCH: Batch = {
    "image": np.zeros((128, 32, 32, 3), np.uint8),
    "label": np.zeros(128, np.int32),
    "mask": np.ones(128, bool),
}


def main() -> None:
    """Compile the training steps of two models in turn and print their times."""
    parser = OneLineParser(__doc__ or "")
    parser.add_argument("shorter", nargs="?", default="resnet110_cifar")
    parser.add_argument("deeper", nargs="?", default="resnet1202_cifar")
    options = parser.parse_args()
    shorter, deeper = options.shorter, options.deeper
    for name in (shorter, deeper):
        if name not in list_models():
            parser.error(f"unknown model {name}; convjax.list_models() names them")
    seconds: dict[str, list[float]] = {shorter: [], deeper: []}
    for _ in range(_ROUNDS):
        for name, times in seconds.items():
            times.append(_compile(name))
            print(f"{name:20} trace, lower and compile {times[-1]:6.1f} s", flush=True)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    print(
        f"{deeper} {medians[deeper]:.1f} s, {shorter} {medians[shorter]:.1f} s (medians of "
        f"{_ROUNDS}): ratio {medians[deeper] / medians[shorter]:.2f}, goal 1.5 or less"
    )


def _compile(name: str) -> float:
    jax.clear_caches()
    model = create_model(name)
    optimiser = make_optimiser(
        OptimiserConfig(), make_schedule(ScheduleConfig(), learning_rate=0.1, total_steps=64_000)
    )
    state = abstract_state(model, optimiser, (32, 32, 3))
    mean, std = (0.5,) * 3, (0.25,) * 3
    step = make_train_step(model, optimiser, key=jax.random.key(0), mean=mean, std=std)
    started = time.perf_counter()
    step.lower(state, _BATCH).compile()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
