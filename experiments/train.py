"""Train a network as a config file says.

    python -m experiments.train --config=configs/quickstart.py --workdir=runs/quickstart

Any field of the config can be given another value; `convjax.training.config` lists them:

    python -m experiments.train --config=configs/quickstart.py --workdir=runs/lower \\
        --config.optimiser.learning_rate=0.05 --config.seed=1

The same command again continues a run that was stopped.
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
    options, extras = parser.parse_known_args(arguments)
    overrides = _take_overrides(extras, parser)
    parser.require(options, "config", "workdir")
    return end_with(lambda: _train(options.config, options.workdir, overrides, started))


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

    config = load_config(config_path, overrides)
    from convjax.training.loop import train  # another second, once the config is right

    result = train(config, workdir, started=started)
    print(
        f"test accuracy {result.test_accuracy:.4f} after {result.steps} steps "
        f"in {result.wall_seconds:.1f} s, in {workdir}"
    )


if __name__ == "__main__":
    sys.exit(main())
