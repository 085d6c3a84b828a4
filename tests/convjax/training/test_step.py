"""Updates and measurements by hand-computed numbers, padding included."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from convjax.training.state import abstract_state, count_parameters, create_state
from convjax.training.step import make_eval_step, make_train_step


class Linear(nn.Module):
    """Logits that are the bias, where the images are the mean."""

    @nn.compact
    def __call__(self, images, train: bool = False):
        return nn.Dense(4, name="head")(images.reshape(images.shape[0], -1))


RNG = np.random.default_rng(0)
STEP = {"mean": (0.5,), "std": (0.25,)}


def batch_of(count: int, padding: int = 0) -> dict[str, np.ndarray]:
    """`count` examples, then `padding` that repeat the first one, masked out."""
    images = RNG.integers(0, 256, (count, 4, 4, 1)).astype(np.uint8)
    labels = RNG.integers(0, 4, count).astype(np.int32)
    rows = [*range(count), *[0] * padding]
    return {"image": images[rows], "label": labels[rows], "mask": np.arange(len(rows)) < count}


@pytest.fixture
def key():
    return jax.random.key(3)


@pytest.fixture
def network(tiny_network):
    return tiny_network(num_classes=4, dropout=0.0)


def test_state_is_complete_and_abstract_state_has_its_shapes(network, key):
    optimiser = optax.sgd(0.1, 0.9)
    state = create_state(network, optimiser, key, (4, 4, 1))
    assert int(state.step) == 0
    assert set(state.params) == {"hidden", "norm", "head"}
    assert set(state.batch_stats) == {"norm"}
    assert count_parameters(state) == (16 * 8 + 8) + 2 * 8 + (8 * 4 + 4)
    abstract = abstract_state(network, optimiser, (4, 4, 1))
    described = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), s) for s in (state, abstract)]
    assert described[0] == described[1]


def test_padding_changes_neither_loss_nor_gradient(key):
    # Without batch norm, which sees the padding: `convjax.data` pads with real images for that.
    network, optimiser = Linear(), optax.sgd(0.5)
    step = make_train_step(network, optimiser, key=key, **STEP)
    short = batch_of(5)
    rows = [0, 1, 2, 3, 4, 0, 1, 2]
    padded = {name: values[rows] for name, values in short.items()}
    padded["mask"] = np.arange(8) < 5
    found = [
        step(create_state(network, optimiser, key, (4, 4, 1)), batch) for batch in (short, padded)
    ]
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def state_with_bias(key, bias):
    """A linear network's state whose logits are `bias` for every image."""
    state = create_state(Linear(), optax.sgd(0.0), key, (4, 4, 1))
    head = {"kernel": jnp.zeros((16, 4)), "bias": jnp.array(bias, jnp.float32)}
    return state.replace(params={"head": head})


def test_metrics_are_those_of_the_parameters_before_the_update(key):
    batch = batch_of(6, padding=2)
    step = make_train_step(Linear(), optax.sgd(0.5), key=key, **STEP)
    state, metrics = step(state_with_bias(key, [0, 0, 0, 0]), batch)
    # Each class has probability 1/4, and argmax is class 0.
    assert float(metrics["loss"]) == pytest.approx(np.log(4))
    assert float(metrics["accuracy"]) == pytest.approx(np.mean(batch["label"][:6] == 0))
    assert int(state.step) == 1
    # The update of plain SGD is the gradient.
    moved = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(state.params)]) / 0.5
    assert float(metrics["gradient_norm"]) == pytest.approx(np.linalg.norm(moved), rel=1e-5)


@pytest.mark.parametrize(
    # Probabilities 1/8, 1/8, 5/8, 1/8; the smoothed target is 0.1, 0.1, 0.7, 0.1.
    ("smoothing", "loss"),
    [(0.0, np.log(8 / 5)), (0.4, 0.7 * np.log(8 / 5) + 0.3 * np.log(8))],
)
def test_label_smoothing_spreads_its_share_over_all_classes(key, smoothing, loss):
    batch = {**batch_of(1), "label": np.array([2], np.int32)}
    step = make_train_step(Linear(), optax.sgd(0.0), key=key, label_smoothing=smoothing, **STEP)
    _, metrics = step(state_with_bias(key, [0, 0, np.log(5), 0]), batch)
    assert float(metrics["loss"]) == pytest.approx(loss)


def test_update_moves_parameters_statistics_and_optimiser(network, key):
    optimiser = optax.sgd(0.1, 0.9)
    state = create_state(network, optimiser, key, (4, 4, 1))
    before = jax.tree.map(np.array, state)
    after, _ = make_train_step(network, optimiser, key=key, **STEP)(state, batch_of(8))
    changed = jax.tree.map(lambda a, b: bool(np.any(a != np.asarray(b))), before, after)
    assert changed.params["head"]["kernel"]
    assert changed.batch_stats["norm"] == {"mean": True, "var": True}
    assert any(jax.tree.leaves(changed.opt_state))


def test_update_consumes_its_state(key):
    state = state_with_bias(key, [0, 0, 0, 0])
    make_train_step(Linear(), optax.sgd(0.0), key=key, **STEP)(state, batch_of(8))
    assert state.params["head"]["kernel"].is_deleted()


def test_dropout_differs_from_step_to_step_and_repeats_at_the_same(tiny_network, key):
    network, optimiser = tiny_network(num_classes=4, dropout=0.5), optax.sgd(0.0)
    step = make_train_step(network, optimiser, key=key, **STEP)
    batch = batch_of(8)
    losses = []
    for number in (0, 1, 1):
        state = create_state(network, optimiser, key, (4, 4, 1))
        state = state.replace(step=jnp.int32(number))
        losses.append(float(step(state, batch)[1]["loss"]))
    assert losses[0] != losses[1] == losses[2]


def test_evaluation_sums_leave_out_the_padding(key):
    batch = {
        "image": np.zeros((5, 4, 4, 1), np.uint8),
        "label": np.array([1, 1, 0, 1, 1], np.int32),
        "mask": np.array([True, True, True, False, False]),
    }
    sums = make_eval_step(Linear(), **STEP)(state_with_bias(key, [0, np.log(5), 0, 0]), batch)
    assert int(sums["correct"]) == 2
    assert int(sums["count"]) == 3
    assert float(sums["loss"]) == pytest.approx(2 * np.log(8 / 5) + np.log(8))
    np.testing.assert_array_equal(sums["prediction"], [1] * 5)
