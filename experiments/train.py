"""Train a network as a config file says.

    python -m experiments.train --config=configs/quickstart.py --workdir=runs/quickstart

Any field of the config can be given another value; `convjax.training.config` lists them:

    python -m experiments.train --config=configs/quickstart.py --workdir=runs/lower \\
        --config.optimiser.learning_rate=0.05 --config.seed=1

The same command again continues a run that was stopped.

Several processes, each with its own devices, train as one where each is started with this command
in a job of SLURM, Open MPI or Kubernetes; elsewhere each is told of the others:

    python -m experiments.train --config=configs/alexnet.py --workdir=/shared/alexnet \\
        --coordinator=node0:7777 --processes=2 --process_id=0

They see one workdir. If one is lost, the others end; a run may be continued with any number.
"""

import sys
import time
from collections.abc import Sequence

from experiments.command import OneLineParser, end_with

_FIELD = "--config."


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and return the exit status."""
    started = time.perf_counter()
    parser = OneLineParser(__doc__ or "")
    parser.add_argument("--config", help="a Python file with get_config()")
    parser.add_argument("--workdir", help="the run's folder, made if need be")
    parser.add_argument("--coordinator", help="HOST:PORT of the first of several processes")
    parser.add_argument("--processes", type=int, help="how many there are")
    parser.add_argument("--process_id", type=int, help="which of them this is, from 0")
    options, extras = parser.parse_known_args(arguments)
    overrides = _take_overrides(extras, parser)
    parser.require(options, "config", "workdir")
    cluster = options.coordinator, options.processes, options.process_id
    given = [value is not None for value in cluster]
    if any(given) and not all(given):
        parser.error("--coordinator, --processes and --process_id go together")
    if all(given) and not 0 <= options.process_id < options.processes:
        parser.error(f"--process_id={options.process_id} must be in [0, {options.processes})")

    def train() -> None:
        from convjax.training.processes import joined

        with joined(*cluster):
            _train(options.config, options.workdir, overrides, started)

    status = end_with(train)
    from convjax.training.processes import leave

    return leave(status)


def _take_overrides(extras: list[str], parser: OneLineParser) -> dict[str, str]:
    """Return the fields and values among the arguments; `--f=v` and `--f v` are the same."""
    overrides: dict[str, str] = {}
    rest = iter(extras)
    for argument in rest:
        if not argument.startswith(_FIELD):
            parser.refuse([argument])
        name, given, value = argument.removeprefix(_FIELD).partition("=")
        overrides[name] = value if given else next(rest, "")
        if not given and not overrides[name]:
            parser.error(f"{argument} needs a value")
    return overrides


def _train(config_path: str, workdir: str, overrides: dict[str, str], started: float) -> None:
    from convjax.training.config import load_config
    from convjax.training.processes import agreed, is_first

    with agreed():
        config = load_config(config_path, overrides)
    from convjax.training.loop import train  # another second, once the config is right

    result = train(config, workdir, started=started)
    if is_first():
        print(
            f"test accuracy {result.test_accuracy:.4f} after {result.steps} steps "
            f"in {result.wall_seconds:.1f} s, in {workdir}"
        )


if __name__ == "__main__":
    sys.exit(main())
