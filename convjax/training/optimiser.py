"""From a config to optax: the learning rate over the run, and how gradients become updates.

Conventions where peers disagree:

- Momentum is optax's and torch's: `v ← μ v + g`, `x ← x - lr v`. The papers of 2012-2014 (Caffe)
  put the learning rate inside, `v ← μ v + lr g`; the two differ for a while after `lr` changes.
- Weight decay takes part in SGD's gradient (`g + λ x`, the L2 penalty of the papers, so momentum
  carries it); in AdamW and LAMB it is decoupled and multiplied by the learning rate.
- Only `kernel` leaves decay, whatever their rank: stages stacked under `nn.scan` have biases of
  rank 2. Biases, norms' scales, class tokens and position embeddings do not (big_vision's rule).
- Gradients are clipped before decay is added.
"""

import itertools
import operator
from collections.abc import Callable

import jax
import optax
from jaxtyping import PyTree

from convjax.training.config import OptimiserConfig, ScheduleConfig


def make_schedule(config: ScheduleConfig, learning_rate: float, total_steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the step, from 0 to `total_steps - 1`.

    Args:
      config: its shape, in fractions of the run.
      learning_rate: its peak; for piecewise, its value before the first boundary.
      total_steps: length of the run.
    """
    warmup_steps = round(config.warmup * total_steps)
    rest = max(1, total_steps - warmup_steps)
    match config.name:
        case "constant":
            schedule = optax.constant_schedule(learning_rate)
        case "cosine":
            schedule = optax.cosine_decay_schedule(learning_rate, rest, config.final)
        case "linear":
            schedule = optax.linear_schedule(learning_rate, config.final * learning_rate, rest)
        case "piecewise":
            levels = itertools.accumulate(config.factors, operator.mul, initial=learning_rate)
            boundaries = [round(each * total_steps) - warmup_steps for each in config.boundaries]
            schedule = optax.join_schedules([*map(optax.constant_schedule, levels)], boundaries)
        case "one_cycle":  # optax has its climb built in: from a 25th of the peak, as torch's
            final_division = 1 / (25 * config.final)
            return optax.cosine_onecycle_schedule(
                total_steps, learning_rate, config.warmup, final_div_factor=final_division
            )
    if warmup_steps == 0:
        return schedule
    climb = optax.linear_schedule(0.0, learning_rate, warmup_steps)
    return optax.join_schedules([climb, schedule], [warmup_steps])


def make_optimiser(
    config: OptimiserConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """Return the optimiser of the name in `config`, clipping and decaying as it says."""
    optimiser = OPTIMISERS[config.name](config, schedule)
    if config.gradient_clip_norm is None:
        return optimiser
    return optax.chain(optax.clip_by_global_norm(config.gradient_clip_norm), optimiser)


def decays(params: PyTree) -> PyTree:
    """Return True for each leaf that weight decay pulls to zero: those named `kernel`."""
    return jax.tree.map_with_path(
        lambda path, _: getattr(path[-1], "key", None) == "kernel", params
    )


def _sgd(config: OptimiserConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(
        optax.add_decayed_weights(config.weight_decay, mask=decays),
        optax.sgd(schedule, config.momentum or None, config.nesterov),
    )


def _adamw(config: OptimiserConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.adamw(
        schedule,
        b1=config.momentum,
        b2=config.second_momentum,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=decays,
        nesterov=config.nesterov,
    )


def _lamb(config: OptimiserConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.lamb(
        schedule,
        b1=config.momentum,
        b2=config.second_momentum,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=decays,
    )


OPTIMISERS: dict[str, Callable[[OptimiserConfig, optax.Schedule], optax.GradientTransformation]] = {
    "sgd": _sgd,
    "adamw": _adamw,
    "lamb": _lamb,
}
