"""C8: the split keeps the slow bus between two GPUs from being the bottleneck.

Claim. Krizhevsky, Sutskever, Hinton (2012), section 3.2: to let GPUs talk in certain layers only
"allows us to precisely tune the amount of communication until it is an acceptable fraction of the
amount of computation".

Method. Three ways to train AlexNet on two devices are compiled by XLA at batch 128, float32:
towers; full connectivity, the network without the split, whose layers are divided by their filters
and each read all of the one before; and data parallelism with 64 images a device, which adds up the
gradients. Read from the programs: the bytes that a device sends in a step. A link's time is bytes
over its bandwidth (`convjax.sharding.links`), the computation's is three forward passes'
multiply-adds over twice the peak of a GTX 580 (1.58 TFLOP/s). The claim holds if the towers send
the least, and for less than a tenth of the computation on PCIe 2.0.

It shows volumes and least times. It cannot show what latency and the driver cost in 2012, nor what
computation and exchange at the same time hide.

    python -m experiments.claims.c08_bus --out=runs/claims [--preset=cpu|smoke]

Measured: towers send 28.6 MiB (3.8 ms on PCIe 2.0), full connectivity 435.8 MiB (57.1 ms), data
parallelism 232.6 MiB (30.5 ms), beside 176 ms of computation.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from convjax.training.workdir import writing
from experiments.claims.claim import Claim, Measurement, Task, main
from experiments.claims.plans import plan, program_of

WAYS: dict[str, tuple[dict[str, int], dict[str, str]]] = {
    "towers": ({"tower": 2}, {}),
    "full connectivity": (
        {"model": 2},
        {"model.name": "alexnet_one_tower", "mesh.rules": "filter_parallel"},
    ),
    "data parallelism": ({"data": 2}, {}),
}
"""The mesh of each way, and what it changes in the config."""

BUS = "PCIe 2.0 x16"
_SHARE = 0.1
_MULTIPLY_ADDS = 0.724e9
"""Of the published network's forward pass, an image."""
_COMPUTATION = 3 * 2 * _MULTIPLY_ADDS * 128 / (2 * 1.58e12)
"""Seconds of a step on two GTX 580 at their peak."""


def measure(task: Task) -> Measurement:
    plans = {name: plan(task, name, mesh, fields) for name, (mesh, fields) in WAYS.items()}
    seconds = {name: each["seconds"] for name, each in plans.items()}
    sent = {name: each["sent_per_device"] for name, each in plans.items()}
    _draw(sent, seconds, task.folder / "bus.png")
    described = (
        f"{name} {sent[name] / 2**20:.1f} MiB, {1e3 * seconds[name][BUS]:.1f} ms on {BUS}"
        for name in WAYS
    )
    return Measurement(
        measured=(
            f"{'; '.join(described)}; computation at least {1e3 * _COMPUTATION:.0f} ms on two "
            f"GTX 580 ({program_of(plans['towers'])})"
        ),
        holds="yes" if holds(sent, seconds["towers"][BUS]) else "no",
        figures=("bus.png",),
    )


def holds(sent: Mapping[str, int], seconds: float) -> bool:
    """Whether towers send the least, in less than a tenth of the computation's time."""
    others = (size for way, size in sent.items() if way != "towers")
    return sent["towers"] < min(others) and seconds < _SHARE * _COMPUTATION


def _draw(sent: Mapping[str, int], seconds: Mapping[str, Any], path: Path) -> None:
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.barh(list(sent), [size / 2**20 for size in sent.values()], color="tab:blue")
    left.set_xlabel("MiB that a GPU sends in a step")
    left.invert_yaxis()
    links = list(next(iter(seconds.values())))
    places = np.arange(len(links))
    for way, (name, times) in enumerate(seconds.items()):
        heights = [1e3 * times[link] for link in links]
        right.bar(places + 0.27 * (way - 1), heights, width=0.27, label=name)
    right.axhline(1e3 * _COMPUTATION, color="black", linestyle="--", label="computation, GTX 580")
    right.set_yscale("log")
    right.set_xticks(places, links, fontsize=8)
    right.set_ylabel("ms a step, at least")
    right.legend(frameon=False, fontsize=7)
    with writing(path):
        figure.savefig(path, dpi=120)


CLAIM = Claim(
    name="C8",
    script="c08_bus",
    title="Talking in few layers keeps the slow bus from being the bottleneck",
    expected="towers send less than full connectivity and data parallelism, and for less than a "
    "tenth of the computation's time on PCIe 2.0",
    measure=measure,
)

if __name__ == "__main__":
    sys.exit(main(CLAIM, __doc__))
