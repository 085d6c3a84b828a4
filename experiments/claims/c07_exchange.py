"""C7: the two GPUs talk only at conv3, fc6, fc7 and fc8.

Claim. Krizhevsky, Sutskever, Hinton (2012), section 3.2: "the GPUs communicate only in certain
layers. This means that, for example, the kernels of layer 3 take input from all kernel maps in
layer 2. However, kernels in layer 4 take input only from those kernel maps in layer 3 which reside
on the same GPU." Its figure 2 crosses from one GPU to the other before conv3, fc6, fc7 and fc8.

Method. The training step of the published network with a tower on each of two devices is compiled
by XLA, and every collective operation of the program is read: its kind, its layer, its pass, its
bytes (`convjax.sharding.plan`). The claim holds if the forward pass gathers at these four layers
and nowhere else, and the backward pass only returns gradients at layers among them. It returns none
at fc8, which both devices compute whole; in 2012 one GPU computed it. Sums of single numbers, such
as the gradient's norm that training reports, are not counted.

It shows the program that would run, not a run.

    python -m experiments.claims.c07_exchange --out=runs/claims [--preset=cpu|smoke]

Measured: forward 10.6 MiB at conv3, 2.2 at fc6, 1.0 at fc7 and fc8; the same backward, but nothing
at fc8; nothing elsewhere.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from convjax.training.workdir import writing
from experiments.claims.claim import Claim, Measurement, Task, main
from experiments.claims.plans import plan, program_of

LAYERS = ("conv1", "conv2", "conv3", "conv4", "conv5", "fc6", "fc7", "fc8")
CROSSED = {"conv3", "fc6", "fc7", "fc8"}
_A_NUMBER = 8
"""Bytes, at most, of a sum of one number."""

Bytes = dict[str, dict[str, int]]


def measure(task: Task) -> Measurement:
    found = plan(task, "two towers", {"tower": 2})
    forward, backward = (sent(found["collectives"], which) for which in ("forward", "backward"))
    rest = sent(found["collectives"], "update")
    _draw(forward, backward, task.folder / "exchange.png")
    return Measurement(
        measured=(
            f"forward {in_words(forward)}; backward {in_words(backward)}; "
            f"elsewhere {in_words(rest)} ({program_of(found)})"
        ),
        holds="yes" if holds(forward, backward, rest) else "no",
        figures=("exchange.png",),
    )


def sent(collectives: Sequence[dict[str, Any]], which: str) -> dict[str, int]:
    """Bytes that a device sends in a pass, by layer, without sums of single numbers."""
    found: dict[str, int] = {}
    for each in collectives:
        for part in each["parts"]:
            if part["pass"] == which and part["bytes"] > _A_NUMBER:
                found[part["layer"]] = found.get(part["layer"], 0) + part["bytes"]
    return found


def holds(forward: dict[str, int], backward: dict[str, int], rest: dict[str, int]) -> bool:
    """Whether a tower reads the other at these layers alone, and nothing else is exchanged."""
    return set(forward) == CROSSED and set(backward) <= CROSSED and bool(backward) and not rest


def in_words(found: dict[str, int]) -> str:
    """Layers with what a device sends there."""
    sizes = (f"{layer} {size / 2**20:.1f} MiB" for layer, size in found.items())
    return ", ".join(sizes) or "nothing"


def _draw(forward: dict[str, int], backward: dict[str, int], path: Path) -> None:
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    layers = [*LAYERS, *sorted({*forward, *backward} - set(LAYERS))]
    places = np.arange(len(layers))
    for offset, (name, found) in zip(
        (-0.2, 0.2), (("forward", forward), ("backward", backward)), strict=True
    ):
        sizes = [found.get(layer, 0) / 2**20 for layer in layers]
        axes.bar(places + offset, sizes, width=0.4, label=name)
    axes.set_xticks(places, layers)
    axes.set_ylabel("MiB that a GPU sends in a step")
    axes.legend(frameon=False)
    with writing(path):
        figure.savefig(path, dpi=120)


CLAIM = Claim(
    name="C7",
    script="c07_exchange",
    title="The two GPUs talk only at conv3, fc6, fc7 and fc8",
    expected="gathers at conv3, fc6, fc7 and fc8 forward, their gradients backward, nothing else",
    measure=measure,
)

if __name__ == "__main__":
    sys.exit(main(CLAIM, __doc__))
