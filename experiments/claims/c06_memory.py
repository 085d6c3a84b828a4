"""C6: one GPU of 3 GB cannot hold AlexNet's training; split over two, it fits.

Claim. Krizhevsky, Sutskever, Hinton (2012), section 3.2: "A single GTX 580 GPU has only 3GB of
memory, which limits the maximum size of the networks that can be trained on it. It turns out that
1.2 million training examples are enough to train networks which are too big to fit on one GPU.
Therefore we spread the net across two GPUs."

Method. The training step of the published network (batch 128, float32, SGD with momentum) is
compiled by XLA for one H200 and for two with a tower each (`convjax.sharding.plan`, no GPU needed),
and what one device must hold is read from the compiled program. The claim holds if that is more
than 3 GB (2³⁰ bytes each) on one device and at most 3 GB on two.

It shows what today's compiler needs, which uses memory again as soon as it may. It cannot show what
cuda-convnet needed in 2012, which gave every layer its own arrays. So the same is also counted
without any reuse: all layers' outputs and their gradients, and three arrays for each parameter.

    python -m experiments.claims.c06_memory --out=runs/claims [--preset=cpu|smoke]

Measured (128 images, two H200s): 1.28 GiB on one device, 0.81 GiB on each of two; 1.96 GiB without
any reuse. So one GPU of 3 GB holds it: the claim does not come out for this network at this batch.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure

from convjax import create_model
from convjax.training.workdir import writing
from experiments.claims.claim import Claim, Holds, Measurement, Task, main
from experiments.claims.plans import GIB, plan, program_of

LIMIT = 3 * GIB
"""Of the GTX 580."""

_BATCH = 128
_BETWEEN = 55**2 * 96 + 27**2 * (96 + 256) + 13**2 * 256 + 6**2 * 256
"""Numbers that norm1, pool1, norm2, pool2 and pool5, which are no modules, put out for an image."""
_COLOURS = {
    "parameters": "tab:blue",
    "optimiser": "tab:cyan",
    "batch": "tab:green",
    "activations": "tab:orange",
    "temporaries": "tab:red",
}


def measure(task: Task) -> Measurement:
    one, two = plan(task, "one device", {}), plan(task, "two towers", {"tower": 2})
    totals = [each["memory_per_device"]["total"] for each in (one, two)]
    _draw({"one device": one, "one of two": two}, task.folder / "memory.png")
    return Measurement(
        measured=(
            f"{totals[0] / GIB:.2f} GiB on one device and {totals[1] / GIB:.2f} GiB on each of two "
            f"({program_of(two)}). Without any reuse of memory, one device would need "
            f"{without_reuse() / GIB:.2f} GiB."
        ),
        holds=holds(*totals),
        figures=("memory.png",),
    )


def holds(one: int, two: int) -> Holds:
    """Whether one device needs more than the limit, and each of two does not."""
    return "yes" if one > LIMIT >= two else "no"


def without_reuse() -> int:
    """Bytes of the published network's step at batch 128 if every array had its own place."""
    model = create_model("alexnet")
    images = jax.ShapeDtypeStruct((_BATCH, 224, 224, 3), jnp.float32)
    shapes = jax.eval_shape(
        lambda variables, images: model.apply(
            variables, images, capture_intermediates=True, mutable=["intermediates"]
        ),
        variables := model.shapes(images),
        images,
    )
    outputs = sum(leaf.size for leaf in jax.tree.leaves(shapes[1])) + _BATCH * _BETWEEN
    parameters = sum(leaf.size for leaf in jax.tree.leaves(variables))
    return 4 * (2 * outputs + 3 * parameters + images.size)


def _draw(plans: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    for row, each in enumerate(plans.values()):
        left = 0.0
        for name, colour in _COLOURS.items():
            size = each["memory_per_device"][name] / GIB
            label = name if row == 0 else None
            axes.barh(row, size, left=left, color=colour, label=label)
            left += size
        axes.text(left + 0.03, row, f"{left:.2f} GiB", va="center")
    axes.axvline(LIMIT / GIB, color="black", linestyle="--")
    axes.text(LIMIT / GIB - 0.03, 0.5, "GTX 580", ha="right", va="center", rotation=90)
    axes.set_yticks(range(len(plans)), list(plans))
    axes.invert_yaxis()
    axes.set_xlabel("GiB of one device, AlexNet's training step at batch 128")
    axes.legend(ncols=5, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 1.18), frameon=False)
    with writing(path):
        figure.savefig(path, dpi=120)


CLAIM = Claim(
    name="C6",
    script="c06_memory",
    title="AlexNet's training does not fit a 3 GB GPU, and fits two",
    expected="more than 3 GB on one device, at most 3 GB on each of two",
    measure=measure,
)

if __name__ == "__main__":
    sys.exit(main(CLAIM, __doc__))
