"""matmul against float64 numpy, its gradients against the ones written out."""

import inspect
import json
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import Blocks, launch, matmul
from pallas_kernels.matmul import reference
from tests.pallas_kernels.arrays import normal
from tests.pallas_kernels.references import Epilogue, assert_agrees, product


@given(
    batch=st.lists(st.integers(0, 3), max_size=2).map(tuple),
    m=st.integers(0, 9),
    k=st.integers(1, 40),
    n=st.integers(1, 9),
    shared=st.booleans(),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
)
def test_product_and_gradients_agree_with_numpy(batch, m, k, n, shared, dtype):
    b_shape = (k, n) if shared else (*batch, k, n)
    assert_agrees(matmul, product, (*batch, m, k), b_shape, Epilogue(dtype))


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
        (r"blocks=Blocks\(m=16, .* must be None", {"blocks": Blocks(16, 16, 16)}),
        ("backend='cuda' must be one of", {"backend": "cuda"}),
        (r"bias of shape \(3,\) must be \(2,\)", {"bias": jnp.ones(3), "backend": "interpret"}),
    ],
)
def test_options_that_do_not_fit(message, options):
    with pytest.raises(ValueError, match=message):
        unchecked(jnp.ones((4, 3)), jnp.ones((3, 2)), **options)


def test_integers_are_refused():
    with pytest.raises(TypeError, match="b of dtype int32 must be floating"):
        unchecked(jnp.ones((4, 3)), jnp.ones((3, 2), jnp.int32))


def test_a_kernel_is_not_replaced_in_silence_where_there_is_no_gpu():
    with pytest.raises(NotImplementedError, match="backend='triton' needs an NVIDIA GPU"):
        matmul(jnp.ones((2, 2)), jnp.ones((2, 2)), backend="triton")


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float8_e4m3fn])
def test_kernels_refuse_other_dtypes(dtype):
    with jax.enable_x64(True):
        a = jnp.ones((2, 2), dtype)
        with pytest.raises(NotImplementedError, match=f"operands of {a.dtype} have no kernel"):
            matmul(a, a, backend="interpret")
        if dtype == jnp.float64:
            assert matmul(a, a).dtype == dtype


@pytest.mark.parametrize("precision", [("high", "default"), "TF32_TF32_F32"])
def test_kernels_refuse_other_precisions(precision):
    a = jnp.ones((2, 2))
    with pytest.raises(NotImplementedError, match=re.escape(f"precision={precision!r} has no")):
        matmul(a, a, precision=precision, backend="interpret")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_misspelt_precision_is_an_error_in_any_dtype(dtype):
    a = jnp.ones((2, 2), dtype)
    for backend in ("interpret", "xla"):
        with pytest.raises(ValueError, match=r"[Pp]recision"):
            matmul(a, a, precision="sloppy", backend=backend)


def test_kernels_read_jaxs_default_precision():
    assert launch.product(jnp.float32, None) == "tf32"
    with jax.default_matmul_precision("float32"):
        assert launch.product(jnp.float32, None) == "ieee"


@pytest.mark.parametrize(("a", "b"), [((2**16, 2**15), (2**15, 1)), ((2**16, 1), (1, 2**15))])
def test_kernels_refuse_arrays_that_32_bits_do_not_count(a, b):
    arrays = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (a, b))
    message = r"65536, 32768\) has 2147483648 elements.*use backend='xla'"
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(partial(matmul, backend="triton"), *arrays)


@pytest.mark.parametrize(("m", "k", "n"), [(0, 3, 2), (4, 0, 2), (4, 3, 0)])
def test_products_without_elements(m, k, n):
    epilogue = Epilogue(bias_dtype=jnp.float32, residual=True, activation="silu")
    assert_agrees(partial(matmul, backend="interpret"), product, (m, k), (k, n), epilogue)


def test_blocks_are_the_forward_launchs():
    blocks = Blocks(32, 16, 64, warps=2, splits=3, group=5)
    call = partial(matmul, backend="interpret", blocks=blocks)
    jaxpr = str(jax.make_jaxpr(lambda a, b: jax.vjp(call, a, b)[1](a))(*[jnp.ones((64, 64))] * 2))
    found = [Blocks(**json.loads(text)) for text in re.findall(r"'blocks': '(.*?)'", jaxpr)]
    assert len(found) == 3
    assert found[0] == blocks
    assert blocks not in found[1:]
