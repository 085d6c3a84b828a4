"""cross_entropy against values worked out by hand and a float64 softmax."""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import cross_entropy


def test_values_by_hand():
    # softmax = [1/6, 2/6, 3/6]
    logits = jnp.log(jnp.array([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]))
    loss = cross_entropy(logits, jnp.array([0, 2]))
    np.testing.assert_allclose(loss, [math.log(6), math.log(2)], rtol=1e-6)


def test_label_smoothing_spreads_its_share_over_all_classes():
    # ε = 0.3 over 3 classes: the target is [0.8, 0.1, 0.1].
    loss = cross_entropy(jnp.log(jnp.array([1.0, 2.0, 3.0])), jnp.array(0), label_smoothing=0.3)
    by_hand = 0.8 * math.log(6) + 0.1 * math.log(3) + 0.1 * math.log(2)
    assert float(loss) == pytest.approx(by_hand, rel=1e-6)


@given(
    batch=st.lists(st.integers(0, 3), max_size=2).map(tuple),
    classes=st.integers(1, 300),
    smoothing=st.sampled_from([0.0, 0.1, 0.9]),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
    label_dtype=st.sampled_from([jnp.int32, jnp.uint8]),
)
def test_loss_and_gradient_agree_with_float64(batch, classes, smoothing, dtype, label_dtype):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(10 * rng.standard_normal((*batch, classes)), dtype)
    labels = jnp.asarray(rng.integers(0, min(classes, 256), batch), label_dtype)

    @jax.jit
    def loss_and_gradient(logits, labels):
        loss, pull = jax.vjp(lambda z: cross_entropy(z, labels, label_smoothing=smoothing), logits)
        return loss, *pull(jnp.ones_like(loss))

    loss, gradient = loss_and_gradient(logits, labels)

    z = np.asarray(logits.astype(jnp.float32), np.float64)
    log_p = z - np.log(np.sum(np.exp(z), -1, keepdims=True))
    target = (1 - smoothing) * np.eye(classes)[np.asarray(labels)] + smoothing / classes
    assert loss.dtype == jnp.float32
    assert gradient.dtype == dtype
    np.testing.assert_allclose(loss, -np.sum(target * log_p, -1), rtol=1e-5, atol=1e-5)
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
    np.testing.assert_allclose(gradient.astype(jnp.float32), np.exp(log_p) - target, atol=tolerance)


def test_large_logits_do_not_overflow():
    loss = cross_entropy(jnp.array([1e4, -1e4]), jnp.array(1))
    assert float(loss) == 2e4


@pytest.mark.parametrize("label", [-1, 3, 255])
def test_a_label_that_is_no_class_is_nan_and_leaves_the_others_alone(label):
    logits = jnp.zeros((2, 3))
    loss = cross_entropy(logits, jnp.array([label, 1]), label_smoothing=0.1)
    assert jnp.isnan(loss[0])
    assert float(loss[1]) == pytest.approx(math.log(3))


unchecked = inspect.unwrap(cross_entropy)


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, float("nan")])
def test_label_smoothing_is_a_share(smoothing):
    with pytest.raises(ValueError, match=rf"label_smoothing={smoothing} must be in \[0, 1\)"):
        cross_entropy(jnp.zeros((2, 3)), jnp.zeros(2, int), label_smoothing=smoothing)


def test_labels_must_fit_and_be_integers():
    with pytest.raises(
        ValueError, match=r"labels of shape \(3,\) must be one for each of \(2, 3\)"
    ):
        unchecked(jnp.zeros((2, 3)), jnp.zeros(3, int))
    with pytest.raises(ValueError, match="labels of dtype float32 must be integers"):
        unchecked(jnp.zeros((2, 3)), jnp.zeros(2))


def test_backends():
    with pytest.raises(NotImplementedError, match="cross_entropy has no backend 'triton'"):
        cross_entropy(jnp.zeros((2, 3)), jnp.zeros(2, int), backend="triton")
    with pytest.raises(ValueError, match="backend='cuda' must be one of"):
        unchecked(jnp.zeros((2, 3)), jnp.zeros(2, int), backend="cuda")
