"""Measure a checkpoint of a run on its test images.

    python -m experiments.evaluate --workdir=runs/quickstart
    python -m experiments.evaluate --workdir=runs/quickstart --checkpoint=best

A run's folder is only read.
"""

import sys
from collections.abc import Sequence

from experiments.command import OneLineParser, end_with


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and return the exit status."""
    parser = OneLineParser(__doc__ or "")
    parser.add_argument("--workdir", help="the run's folder")
    parser.add_argument(
        "--checkpoint", default="latest", help="best, latest or a step (default: latest)"
    )
    options, extras = parser.parse_known_args(arguments)
    parser.refuse(extras)
    parser.require(options, "workdir")
    checkpoint = options.checkpoint
    if checkpoint not in ("best", "latest") and not checkpoint.isdecimal():
        parser.error(f"--checkpoint={checkpoint} must be best, latest or a step")
    return end_with(lambda: _evaluate(options.workdir, checkpoint))


def _evaluate(workdir: str, checkpoint: str) -> None:
    from convjax.training.evaluation import evaluate_run

    step, evaluation = evaluate_run(workdir, checkpoint)
    print(
        f"test accuracy {evaluation.accuracy:.4f}, test loss {evaluation.loss:.4f} on "
        f"{len(evaluation.predictions):,} images, step {step}, in {workdir}"
    )


if __name__ == "__main__":
    sys.exit(main())
