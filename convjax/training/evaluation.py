"""How right a network is on a whole split."""

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Int32

from convjax.training.checkpoint import read_checkpoint, saved_steps
from convjax.training.errors import RunError, reading_images
from convjax.training.parts import Parts, assemble
from convjax.training.state import TrainState
from convjax.training.step import EvalStep
from convjax.training.workdir import Workdir


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """A measurement; each image counts once, whatever the batches were padded with.

    Attributes:
      accuracy: share of the images whose largest logit is the label's.
      loss: mean cross-entropy, without label smoothing.
      predictions: the largest logit's class, for each image in the split's order.
    """

    accuracy: float
    loss: float
    predictions: Int32[np.ndarray, " n"]


def evaluate(eval_step: EvalStep, state: TrainState, parts: Parts) -> Evaluation:
    """Measure a network on every test image of a run.

    Raises:
      RunError: an image cannot be read.
    """
    reading = reading_images("the test split")
    place = parts.layout.placed
    with contextlib.closing(parts.test_data.iterator()) as batches, reading:
        # One wait at the end: the next batch is read while the device works.
        sums = jax.device_get([eval_step(state, place(batch)) for batch in batches])
    count = sum(int(each["count"]) for each in sums)
    return Evaluation(
        accuracy=sum(int(each["correct"]) for each in sums) / count,
        loss=math.fsum(float(each["loss"]) for each in sums) / count,
        predictions=np.concatenate([each["prediction"] for each in sums])[:count],
    )


def evaluate_run(workdir: str | Path, checkpoint: str = "latest") -> tuple[int, Evaluation]:
    """Measure a checkpoint of the run in `workdir` on its test images; the folder is only read.

    Args:
      workdir: of a run of `train`, finished or not.
      checkpoint: `latest`, `best` (of the highest test accuracy) or a step.

    Returns:
      The checkpoint's step, and the measurement.

    Raises:
      ConfigError: the run's config can no longer be run.
      RunError: there is no such run or checkpoint, or it is damaged.
      ValueError: `checkpoint` is no name or step.
    """
    if checkpoint not in ("best", "latest") and not checkpoint.isdecimal():
        raise ValueError(f"checkpoint={checkpoint!r} must be best, latest or a step")
    folder = Workdir(workdir)
    config = folder.read_config()
    steps = saved_steps(folder.checkpoints)
    if not steps:
        raise RunError(f"no checkpoint in {folder.checkpoints}")
    parts = assemble(config)
    step = int(checkpoint) if checkpoint.isdecimal() else steps[-1]
    like = parts.abstract_state()
    state, progress = read_checkpoint(folder.checkpoints, step, like)
    if checkpoint == "best":
        if progress.best_step is None:
            raise RunError(f"nothing in {folder.checkpoints} is measured yet; ask for latest")
        step = progress.best_step
        state, _ = read_checkpoint(folder.checkpoints, step, like)
    return step, evaluate(parts.eval_step(), state, parts)
