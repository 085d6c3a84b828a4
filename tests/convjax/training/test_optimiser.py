"""Learning rates by literal value, and updates by the conventions that the module names."""

from typing import get_args, get_type_hints

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from convjax.training.config import OptimiserConfig, ScheduleConfig
from convjax.training.optimiser import OPTIMISERS, decays, make_optimiser, make_schedule

PARAMS = {
    "conv1": {"kernel": jnp.full((3, 3, 1, 2), 2.0), "bias": jnp.full((2,), 2.0)},
    "conv2_x": {  # stacked under a scan: the bias has rank 2
        "kernel": jnp.full((5, 3, 3, 2, 2), 2.0),
        "bias": jnp.full((5, 2), 2.0),
        "scale": jnp.full((5, 2), 2.0),
    },
    "cls_token": jnp.full((1, 1, 4), 2.0),
}


def rates(config: ScheduleConfig, total_steps: int = 10, peak: float = 1.0) -> list[float]:
    schedule = make_schedule(config, peak, total_steps)
    return jax.vmap(schedule)(jnp.arange(total_steps)).tolist()


def test_constant():
    assert rates(ScheduleConfig(), 3, 0.25) == [0.25] * 3


def test_warmup_climbs_from_zero_to_the_peak():
    config = ScheduleConfig(name="constant", warmup=0.4)
    np.testing.assert_allclose(rates(config), [0, 0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1])


def test_cosine_ends_at_final():
    found = rates(ScheduleConfig(name="cosine", warmup=0.2, final=0.1))
    np.testing.assert_allclose(found[:3], [0, 0.5, 1], atol=1e-6)
    assert found[6] == pytest.approx(0.55)  # half of the way down
    schedule = make_schedule(ScheduleConfig(name="cosine", final=0.1), 2.0, 10)
    assert float(schedule(10)) == pytest.approx(0.2)


def test_linear():
    np.testing.assert_allclose(rates(ScheduleConfig(name="linear"), 4), [1, 0.75, 0.5, 0.25])


def test_piecewise_counts_from_the_start_of_the_run():
    config = ScheduleConfig(
        name="piecewise", warmup=0.2, boundaries=(0.5, 0.75), factors=(0.1, 0.1)
    )
    found = rates(config, 12)
    np.testing.assert_allclose(found, [0, 0.5] + [1] * 4 + [0.1] * 3 + [0.01] * 3, rtol=1e-6)


def test_piecewise_of_a_run_too_short_for_its_boundaries_keeps_the_last():
    config = ScheduleConfig(name="piecewise", boundaries=(0.5, 0.6), factors=(0.1, 0.1))
    np.testing.assert_allclose(rates(config, 2), [1, 0.01], rtol=1e-6)


def test_one_cycle():
    schedule = make_schedule(ScheduleConfig(name="one_cycle", warmup=0.25, final=0.001), 1.0, 100)
    found = [float(schedule(step)) for step in (0, 25, 100)]
    np.testing.assert_allclose(found, [1 / 25, 1, 0.001], rtol=1e-5)


def test_the_config_names_every_optimiser():
    assert get_args(get_type_hints(OptimiserConfig)["name"]) == tuple(OPTIMISERS)


def test_only_kernels_decay():
    assert decays(PARAMS) == {
        "conv1": {"kernel": True, "bias": False},
        "conv2_x": {"kernel": True, "bias": False, "scale": False},
        "cls_token": False,
    }


@pytest.mark.parametrize("name", OPTIMISERS)
def test_decay_spares_all_but_kernels(name):
    config = OptimiserConfig(name=name, weight_decay=0.5)
    optimiser = make_optimiser(config, optax.constant_schedule(0.1))
    zeros = optax.tree.zeros_like(PARAMS)
    updates, _ = jax.jit(optimiser.update)(zeros, optimiser.init(PARAMS), PARAMS)
    assert np.all(np.asarray(updates["conv2_x"]["kernel"]) < 0)
    del updates["conv1"]["kernel"], updates["conv2_x"]["kernel"]
    del zeros["conv1"]["kernel"], zeros["conv2_x"]["kernel"]
    chex.assert_trees_all_equal(updates, zeros)


def two_updates(config: OptimiserConfig, rates: list[float]) -> list[float]:
    """Updates of a kernel at 2 whose gradient is 1, twice; the kernel stays where it is."""
    optimiser = make_optimiser(config, lambda step: jnp.asarray(rates)[step])
    params = {"kernel": jnp.full((1,), 2.0)}
    state = optimiser.init(params)
    found = []
    update = jax.jit(optimiser.update)
    for _ in range(2):
        updates, state = update({"kernel": jnp.ones(1)}, state, params)
        found.append(float(updates["kernel"][0]))
    return found


def test_momentum_leaves_the_rate_outside_the_velocity():
    # v = 1, then 0.9 + 1; Caffe's convention would give -0.1, -(0.09 + 0.01).
    found = two_updates(OptimiserConfig(momentum=0.9), [0.1, 0.01])
    np.testing.assert_allclose(found, [-0.1, -0.019], rtol=1e-6)


def test_nesterov():
    # g + μ v: 1 + 0.9, then 1 + 0.9 × 1.9.
    found = two_updates(OptimiserConfig(momentum=0.9, nesterov=True), [0.1, 0.1])
    np.testing.assert_allclose(found, [-0.19, -0.271], rtol=1e-6)


def test_sgd_decay_is_part_of_the_gradient():
    # g + λx = 1 + 0.5 × 2 = 2, and the velocity carries it: 0.9 × 2 + 2.
    found = two_updates(OptimiserConfig(momentum=0.9, weight_decay=0.5), [0.1, 0.1])
    np.testing.assert_allclose(found, [-0.2, -0.38], rtol=1e-6)


def test_adamw_decay_is_decoupled():
    # Adam's first two steps on a constant gradient are 1 each; the decay adds 0.5 × 2.
    found = two_updates(OptimiserConfig(name="adamw", weight_decay=0.5), [0.1, 0.1])
    np.testing.assert_allclose(found, [-0.2, -0.2], rtol=1e-5)


def test_no_momentum_keeps_no_velocity():
    optimiser = make_optimiser(OptimiserConfig(momentum=0.0), optax.constant_schedule(0.1))
    sizes = [leaf.size for leaf in jax.tree.leaves(optimiser.init(PARAMS))]
    assert sum(sizes) <= 1  # the schedule's count


def test_clipping_comes_before_decay():
    config = OptimiserConfig(momentum=0.0, weight_decay=0.5, gradient_clip_norm=0.25)
    found = two_updates(config, [1.0, 1.0])
    np.testing.assert_allclose(found, [-1.25, -1.25], rtol=1e-6)
