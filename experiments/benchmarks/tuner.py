"""A training step before and after the tuner: which algorithm wins where, and what that brings.

    python -m experiments.benchmarks.tuner --model=alexnet --batch=16 --out=DIR [--budget=600]

Every pass of every layer is timed in every way, alone (`pallas_kernels.tune`); then the whole step
is compiled as it was and as the table now says, and both are run in turn. DIR gets the numbers
(`tuner.json`), the table and a picture of the winners. What wins alone can lose in a network, where
XLA fuses it with its neighbours: so the step's own times stand beside the sum of the layers'.

`alexnet` is the chain of its layers, of the 2012 paper, without dropout; `resnet50` is the model.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
from jaxtyping import Array
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import convjax
import pallas_kernels
from experiments.command import OneLineParser, end_with
from pallas_kernels.tuning.report import Report, Row, as_json, label
from pallas_kernels.workloads import CLASSES, network

_ROUNDS = 9

Step = Callable[..., Any]


def main() -> None:
    """Tune and time what the command asks for."""
    parser = OneLineParser(__doc__ or "")
    parser.add_argument("--model", default="alexnet", choices=("alexnet", "resnet50"))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--budget", type=float, default=600.0, help="seconds; by default 600")
    parser.add_argument("--out", type=Path, default=Path("tuner"))
    options = parser.parse_args()
    if options.batch < 1 or not options.budget > 0:
        parser.error(f"batch={options.batch} and budget={options.budget} must be above 0")
    options.out.mkdir(parents=True, exist_ok=True)
    # The table is this run's own, and empty when it begins.
    os.environ["CONVJAX_TUNING"] = tempfile.mkdtemp(prefix="tables-", dir=options.out)
    step, arguments = {"alexnet": _alexnet, "resnet50": _resnet50}[options.model](options.batch)
    before = jax.jit(step).lower(*arguments).compile()
    report = _tune(step, arguments, options.budget)
    print(report)
    after = jax.jit(step).lower(*arguments).compile()
    seconds = _in_turn({"default": before, "tuned": after}, arguments)
    _write(report, seconds, options.out, f"{options.model}, batch {options.batch}")
    print(
        f"{options.model} training step, batch {options.batch}: {seconds['default'] * 1e3:.0f} ms "
        f"by default, {seconds['tuned'] * 1e3:.0f} ms tuned (medians of {_ROUNDS} in turn); "
        f"all in {options.out}"
    )


def _alexnet(batch: int) -> tuple[Step, tuple[Any, ...]]:
    layers = network("alexnet", batch)
    operands = {layer.layer: layer.call.operands() for layer in layers}
    parameters = {
        name: {key: x for key, x in arrays.items() if key in ("w", "b", "bias")}
        for name, arrays in operands.items()
    }
    float32 = jnp.float32

    def loss(parameters: dict[str, dict[str, Array]], images: Array, labels: Array) -> Array:
        x = images
        for layer in layers[:-1]:
            given = parameters[layer.layer]
            first, *_ = operands[layer.layer].items()
            x = layer.call.function()(**{first[0]: x.reshape(first[1].shape)}, **given)
        return jnp.mean(pallas_kernels.cross_entropy(x, labels))

    arrays = jax.tree.map(
        lambda x: 0.02 * jax.random.normal(jax.random.key(x.size), x.shape, float32), parameters
    )
    images = jax.random.normal(jax.random.key(0), (batch, 224, 224, 3))
    return jax.value_and_grad(loss), (arrays, images, jnp.arange(batch) % CLASSES)


def _resnet50(batch: int) -> tuple[Step, tuple[Any, ...]]:
    model = convjax.create_model("resnet50")
    images = jax.random.normal(jax.random.key(0), (batch, 224, 224, 3))
    variables = model.init(jax.random.key(1), images)

    def loss(parameters: Any, statistics: Any, images: Array, labels: Array) -> Array:
        variables = {"params": parameters, "batch_stats": statistics}
        logits, _ = model.apply(variables, images, train=True, mutable=["batch_stats"])
        return jnp.mean(pallas_kernels.cross_entropy(logits, labels))

    labels = jnp.arange(batch) % CLASSES
    return jax.value_and_grad(loss), (
        variables["params"],
        variables["batch_stats"],
        images,
        labels,
    )


def _tune(step: Step, arguments: tuple[Any, ...], budget: float) -> Report:
    columns = (TextColumn("tuning"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("tuning", total=None)

        def progress(done: int, total: int, left: float) -> None:
            bar.update(task, completed=done, total=total)
            if bar.disable and done % 10 == 0:
                print(f"tuned {done} of {total}, {left:.0f} s left", file=sys.stderr, flush=True)

        return pallas_kernels.tune(step, *arguments, budget=budget, progress=progress)


def _in_turn(programs: dict[str, Any], arguments: tuple[Any, ...]) -> dict[str, float]:
    """Median seconds of each program, run in turn."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for round_ in range(_ROUNDS + 1):
        for name, program in programs.items():
            started = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            if round_:  # the first is warming up
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(each) for name, each in times.items()}


def _write(report: Report, seconds: dict[str, float], out: Path, title: str) -> None:
    record = {
        "title": title,
        "device": report.device_kind,
        "jax": jax.__version__,
        "step_seconds": seconds,
        "fixed_seconds": _fixed(report),
        "rows": [as_json(row) for row in report.rows],
    }
    (out / "tuner.json").write_text(json.dumps(record, indent=1) + "\n")
    (out / "tuner.txt").write_text(f"{report}\n")
    _picture(report, title).savefig(out / "tuner.png", dpi=150, bbox_inches="tight")


def _convolutions(report: Report) -> list[Row]:
    rows = [row for row in report.rows if row.call.operation == "conv2d" and row.measured]
    return sorted(rows, key=lambda row: -row.call.operands()["x"].shape[1])


def _fixed(report: Report) -> dict[str, float]:
    """Seconds of all convolutions by one algorithm, and by the winners.

    Where an algorithm cannot do a pass, the default does it.
    """
    rows = _convolutions(report)
    names = {way.algorithm for row in rows for way, _ in row.measured}
    totals: dict[str, float] = {}
    for name in sorted(filter(None, names)):
        totals[name] = sum(row.count * _seconds_by(name, row) for row in rows)
    return totals | {"the winners": sum(row.count * (row.seconds or 0.0) for row in rows)}


def _seconds_by(algorithm: str, row: Row) -> float:
    times = [seconds for way, seconds in row.measured if way.algorithm == algorithm]
    return min(times, default=row.default_seconds or 0.0)


def _picture(report: Report, title: str) -> Figure:
    """Who won each pass of each convolution, by colour, and the totals of each single algorithm."""
    matplotlib.use("agg")
    rows, totals = _convolutions(report), _fixed(report)
    shapes = list(dict.fromkeys(label(row.call) for row in rows))
    passes = list(dict.fromkeys(which for row in rows for which in row.call.passes))
    names = [name for name in totals if name != "the winners"]
    colours = dict(zip(names, matplotlib.colormaps["tab10"].colors, strict=False))  # pyright: ignore
    figure = Figure(figsize=(11, 1.5 + 0.3 * len(shapes)), layout="constrained")
    grid, bars = figure.subplots(1, 2, width_ratios=(2, 1))
    for row in rows:
        place = passes.index(row.which), shapes.index(label(row.call))
        winner = (row.winner and row.winner.algorithm) or "direct"
        grid.add_patch(
            Rectangle((place[0] - 0.48, place[1] - 0.45), 0.96, 0.9, color=colours[winner])
        )
        gain = "" if row.gain is None or row.gain < 1.005 else f", {row.gain:.2f}× the default"
        grid.text(*place, f"{winner}{gain}", ha="center", va="center", fontsize=7)
    grid.set(
        xlim=(-0.5, len(passes) - 0.5),
        ylim=(len(shapes) - 0.5, -0.5),
        xticks=range(len(passes)),
        yticks=range(len(shapes)),
        title=f"The fastest algorithm of each pass: {title}",
    )
    grid.set_xticklabels([which.replace("_", " ") for which in passes])
    grid.set_yticklabels([shape.removeprefix("conv2d ") for shape in shapes], fontsize=7)
    bars.barh(
        list(totals),
        [seconds * 1e3 for seconds in totals.values()],
        color=[colours.get(name, "0.3") for name in totals],
    )
    bars.set(
        xlabel="ms for all convolutions of a step", title="One algorithm for all, or the winners"
    )
    return figure


if __name__ == "__main__":
    sys.exit(end_with(main))
