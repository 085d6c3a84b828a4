"""matmul against float64 numpy, its gradients against the ones written out."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import matmul
from pallas_kernels.matmul import reference

TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2}


def normal(seed, shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def float64(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def assert_close(actual, expected, tolerance):
    actual = float64(actual)
    assert actual.shape == expected.shape
    scale = np.max(np.abs(expected), initial=1e-30)
    assert np.max(np.abs(actual - expected), initial=0) <= tolerance * scale


@given(
    batch=st.lists(st.integers(0, 3), max_size=2).map(tuple),
    m=st.integers(0, 9),
    k=st.integers(1, 40),
    n=st.integers(1, 9),
    shared=st.booleans(),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
)
def test_product_and_gradients_agree_with_numpy(batch, m, k, n, shared, dtype):
    a, g = normal(0, (*batch, m, k), dtype), normal(1, (*batch, m, n), dtype)
    b = normal(2, (k, n) if shared else (*batch, k, n), dtype)

    @jax.jit
    def run(a, b, g):
        y, pull = jax.vjp(matmul, a, b)
        return y, *pull(g)

    y, da, db = run(a, b, g)
    assert y.dtype == da.dtype == db.dtype == dtype
    a64, b64, g64 = map(float64, (a, b, g))
    expected_db = np.swapaxes(a64, -1, -2) @ g64
    if shared:
        expected_db = expected_db.sum(tuple(range(len(batch))))
    for actual, expected in (
        (y, a64 @ b64),
        (da, g64 @ np.swapaxes(b64, -1, -2)),
        (db, expected_db),
    ):
        assert_close(actual, expected, TOLERANCE[dtype])


def test_bias_residual_and_activation_in_that_order():
    a, b = jnp.array([[1.0, 2.0]]), jnp.array([[1.0, 1.0], [1.0, -3.0]])  # a b = [3, -5]
    bias, residual = jnp.array([-4.0, 1.0]), jnp.array([[0.5, 6.0]])
    y = matmul(a, b, bias=bias, residual=residual, activation="relu")
    np.testing.assert_array_equal(y, [[0, 2]])
    np.testing.assert_array_equal(reference(a, b, bias=bias, residual=residual), [[-0.5, 2]])


def test_gelu_is_exact_unless_tanh_is_asked_for():
    one = jnp.ones((1, 1))
    assert float(matmul(one, one, activation="gelu")[0, 0]) == pytest.approx(0.841345, abs=1e-6)
    tanh = matmul(one, one, activation="gelu_tanh")
    assert float(tanh[0, 0]) == pytest.approx(0.841192, abs=1e-6)


def test_low_precision_is_accumulated_in_float32():
    # 4,096 ones and a half: in bfloat16 the sum would stop growing at 256.
    a = jnp.ones((1, 4096), jnp.bfloat16)
    b = jnp.ones((4096, 1), jnp.bfloat16).at[0, 0].set(1.5)
    assert matmul(a, b, out_dtype=jnp.float32).tolist() == [[4096.5]]


def test_gradients_of_bfloat16_are_bfloat16_products():
    a, b = normal(0, (4, 8), jnp.bfloat16), normal(1, (8, 3), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(jax.grad(lambda a, b: jnp.sum(matmul(a, b)), (0, 1)))(a, b)
    dots = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert len(dots) == 2
    for dot in dots:
        assert [v.aval.dtype for v in dot.invars] == [jnp.bfloat16, jnp.bfloat16]


def test_smooth_activations_keep_one_number_an_element():
    a, b = normal(0, (64, 2)), normal(1, (2, 64))
    _, pull = jax.vjp(lambda a, b: matmul(a, b, activation="gelu"), a, b)
    kept = sum(leaf.size for leaf in jax.tree.leaves(pull))
    assert 64 * 64 <= kept <= 64 * 64 + a.size + b.size + 16


def test_second_derivatives_and_forward_mode():
    a, b = normal(0, (2, 3)), normal(1, (3, 2))

    def hessian(product):
        def loss(a, b):
            return jnp.sum(product(a, b, activation="silu") ** 2)

        return jax.tree.leaves(jax.jit(jax.hessian(loss, (0, 1)))(a, b))

    for ours, theirs in zip(hessian(matmul), hessian(reference), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_rows_split_over_devices_stay_split():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    a = jax.device_put(normal(0, (64, 32)), split)
    b = jax.device_put(normal(1, (32, 16)), whole)

    def gradients(a, b):
        return jax.grad(lambda a, b: jnp.sum(matmul(a, b, activation="gelu")), (0, 1))(a, b)

    compiled = jax.jit(gradients).lower(a, b).compile()
    text = compiled.as_text()
    assert not re.search(r"all-gather|all-to-all|collective-permute", text)
    assert text.count(" all-reduce(") == 1
    da, _ = compiled(a, b)
    assert da.sharding.is_equivalent_to(split, 2)


# The tests' type checker would object first to what it can see.
unchecked = inspect.unwrap(matmul)


@pytest.mark.parametrize(
    ("message", "a", "b"),
    [
        ("a has k=3 columns but b has k=4 rows", (2, 3), (4, 2)),
        (
            r"b of shape \(5, 3, 2\) must be one matrix, or one for each of a's",
            (4, 2, 3),
            (5, 3, 2),
        ),
        (r"b of shape \(3,\) must be one matrix", (2, 3), (3,)),
        (r"b of shape \(3, 2\) must be one matrix.*, of shape \(3,\)", (3,), (3, 2)),
    ],
)
def test_shapes_that_do_not_fit(message, a, b):
    with pytest.raises(ValueError, match=message):
        unchecked(jnp.ones(a), jnp.ones(b))


@pytest.mark.parametrize(
    ("message", "options"),
    [
        (r"bias of shape \(3,\) must be \(2,\)", {"bias": jnp.ones(3)}),
        (r"residual of shape \(2,\) must have the output's shape", {"residual": jnp.ones(2)}),
        ("activation='elu' must be None or one of 'relu'", {"activation": "elu"}),
        ("blocks=64 must be None", {"blocks": 64}),
        ("backend='cuda' must be one of", {"backend": "cuda"}),
    ],
)
def test_options_that_do_not_fit(message, options):
    with pytest.raises(ValueError, match=message):
        unchecked(jnp.ones((4, 3)), jnp.ones((3, 2)), **options)


def test_integers_are_refused():
    with pytest.raises(TypeError, match="b of dtype int32 must be floating"):
        unchecked(jnp.ones((4, 3)), jnp.ones((3, 2), jnp.int32))


def test_backends_to_come_are_not_replaced_in_silence():
    with pytest.raises(NotImplementedError, match="matmul has no backend 'triton'; it has 'xla'"):
        matmul(jnp.ones((2, 2)), jnp.ones((2, 2)), backend="triton")
