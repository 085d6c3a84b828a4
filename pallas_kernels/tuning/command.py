"""The command's arguments, and what it prints and returns.

The exit status is 0 when all went well, 2 when the question was wrong, with one line that says why,
and 130 after Ctrl-C; what was tuned until then is kept.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp

from pallas_kernels import launch, selection
from pallas_kernels.command_line import OneLineParser
from pallas_kernels.inspect.arguments import DTYPES
from pallas_kernels.selection import Question
from pallas_kernels.tuning import tables
from pallas_kernels.tuning.report import as_json
from pallas_kernels.tuning.search import tune_all
from pallas_kernels.workloads import NETWORKS, network


def main(arguments: Sequence[str] | None = None, *, description: str | None = None) -> int:
    """Tune what `arguments` ask for, by default the command line's; the exit status."""
    parser = OneLineParser("python -m pallas_kernels.tuning", description)
    add = parser.add_argument
    add("--model", required=True, choices=NETWORKS, help="whose layers are tuned")
    add("--batch", type=_positive, help="images; by default the paper's")
    add("--dtype", choices=DTYPES, help="by default bfloat16 on a GPU, float32 elsewhere")
    add("--budget", type=_seconds, default=600.0, metavar="SECONDS", help="by default 600")
    add("--again", action="store_true", help="also what the table has")
    add("--json", action="store_true", help="an object for each pass of each shape")
    options = parser.options(arguments)
    dtype = options.dtype or ("bfloat16" if launch.platform() == "gpu" else "float32")
    questions = _questions(options.model, options.batch, dtype)
    progress = _Progress()
    try:
        report = tune_all(questions, budget=options.budget, again=options.again, progress=progress)
    except KeyboardInterrupt:
        print("\ninterrupted; what was tuned is kept", file=sys.stderr)
        return 130
    print(json.dumps([as_json(row) for row in report.rows], indent=2) if options.json else report)
    if options.json and report.unscreened:
        print(f"kernels were not compiled first: {report.unscreened}", file=sys.stderr)
    path = tables.path_of(launch.device_kind())
    kept = path is not None and path.exists()
    print(f"choices in {path}" if kept else "choices are not on disk", file=sys.stderr)
    return 0


def _questions(model: str, batch: int | None, dtype: str) -> dict[Question, int]:
    """What a training step asks: every pass of every layer, but no gradient of the images."""
    questions: dict[Question, int] = {}
    for index, workload in enumerate(network(model, batch)):
        call = replace(workload.call, dtype=jnp.dtype(dtype).name)
        asked = [
            selection.asked(call, which)
            for which in call.passes
            if index or which != "input_gradient"
        ]
        for question in dict.fromkeys(asked):
            questions[question] = questions.get(question, 0) + workload.count
    return questions


class _Progress:
    """One line that is written over on a terminal, and at most one in five seconds elsewhere."""

    def __init__(self) -> None:
        self._said = -float("inf")

    def __call__(self, done: int, total: int, left: float) -> None:
        minutes, seconds = divmod(round(left), 60)
        line = f"tuned {done} of {total}, {minutes} min {seconds} s left"
        now = time.monotonic()
        if sys.stderr.isatty():
            print(f"\r{line:<60}", end="\n" if done == total else "", file=sys.stderr, flush=True)
        elif done == total or now - self._said >= 5:
            self._said = now
            print(line, file=sys.stderr, flush=True)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} must be a whole number from 1 on")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be a number of seconds above 0")
    return seconds
