"""Batch norm: the peers' conventions by their numbers, and the same statistics on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from convjax.layers import BatchNorm


def initial(norm, x):
    return norm.init(jax.random.key(0), x, train=False)


@pytest.mark.parametrize(
    ("convention", "momentum", "running_var"),
    [("flax", 0.9, 1.0), ("torch", 0.1, 1.1), ("flax", None, 1.0), ("torch", None, 1.1)],
)
def test_running_variance_of_the_peers(convention, momentum, running_var):
    norm = BatchNorm(convention=convention, momentum=momentum)
    x = jnp.array([[0.0], [2.0]])
    _, updates = norm.apply(initial(norm, x), x, train=True, mutable=["batch_stats"])
    assert updates["batch_stats"]["var"][0] == pytest.approx(running_var, abs=1e-6)
    assert updates["batch_stats"]["mean"][0] == pytest.approx(0.1, abs=1e-6)


def test_output_and_gradients_are_those_of_flax():
    x = jax.random.normal(jax.random.key(1), (6, 5, 4, 3)) * 3 + 2
    target = jax.random.normal(jax.random.key(2), x.shape)
    ours, theirs = BatchNorm(), nn.BatchNorm(momentum=0.9)
    variables = initial(ours, x)
    params = {"scale": jnp.array([0.5, 1.5, -2.0]), "bias": jnp.array([1.0, 0.0, -1.0])}

    def loss(params, x, norm, **mode):
        variables_ = {"params": params, "batch_stats": variables["batch_stats"]}
        y, updates = norm.apply(variables_, x, **mode, mutable=["batch_stats"])
        return jnp.sum((y - target) ** 2), updates

    grad = jax.grad(loss, argnums=(0, 1), has_aux=True)
    got = grad(params, x, ours, train=True)
    want = grad(params, x, theirs, use_running_average=False)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


def test_evaluation_uses_running_statistics():
    norm = BatchNorm(epsilon=0.0)
    x = jnp.array([[1.0, 10.0]])
    variables = {
        "params": {"scale": jnp.array([2.0, 1.0]), "bias": jnp.array([0.0, 5.0])},
        "batch_stats": {"mean": jnp.array([0.0, 8.0]), "var": jnp.array([4.0, 1.0])},
    }
    np.testing.assert_allclose(norm.apply(variables, x, train=False), [[1.0, 7.0]], rtol=1e-6)


def test_statistics_are_float32_in_bfloat16():
    norm = BatchNorm(dtype=jnp.bfloat16)
    x = jnp.full((4096, 1), 1.0078125, jnp.bfloat16)
    y, updates = norm.apply(initial(norm, x), x, train=True, mutable=["batch_stats"])
    assert y.dtype == jnp.bfloat16
    assert updates["batch_stats"]["mean"].dtype == jnp.float32
    np.testing.assert_allclose(updates["batch_stats"]["mean"], 0.1 * 1.0078125, rtol=1e-5)


@pytest.mark.parametrize("convention", ["flax", "torch"])
@pytest.mark.parametrize("transformation", ["jit", "shard_map"])
def test_eight_replicas_keep_the_statistics_of_the_whole_batch(convention, transformation):
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    x = jax.random.normal(jax.random.key(1), (16, 3, 3, 5)) + jnp.arange(16.0).reshape(16, 1, 1, 1)
    alone = BatchNorm(convention=convention)
    variables = initial(alone, x)

    def train(norm, variables, x):
        y, updates = norm.apply(variables, x, train=True, mutable=["batch_stats"])
        return y, updates["batch_stats"]

    want_y, want = train(alone, variables, x)
    if transformation == "jit":
        sharded = jax.device_put(x, NamedSharding(mesh, P("data")))
        got_y, got = jax.jit(lambda v, x: train(alone, v, x))(variables, sharded)
    else:
        named = BatchNorm(convention=convention, axis_name="data")
        got_y, got = jax.shard_map(
            lambda v, x: train(named, v, x),
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=(P("data"), P()),
        )(variables, x)
    np.testing.assert_allclose(got_y, want_y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got["mean"], want["mean"], rtol=1e-5)
    np.testing.assert_allclose(got["var"], want["var"], rtol=1e-5)


def test_errors_name_the_value_and_the_rule():
    x = jnp.ones((1, 4))
    with pytest.raises(ValueError, match=r"momentum=1\.5 must lie in \[0, 1\]"):
        initial(BatchNorm(momentum=1.5), x)
    norm = BatchNorm(convention="torch")
    with pytest.raises(ValueError, match="needs 2 values a channel, got 1"):
        norm.apply(initial(norm, x), x, train=True, mutable=["batch_stats"])
