"""layer_norm, by XLA and by the interpreted kernels, against float64 numpy."""

import inspect
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import Blocks
from pallas_kernels.layer_norm import default_blocks, layer_norm, search_space
from tests.compiling import quick_jit
from tests.pallas_kernels.arrays import assert_close, distance, float64, normal
from tests.pallas_kernels.references import TOLERANCE
from tests.pallas_kernels.test_kernels import FEW, MANY
from tests.pallas_kernels.test_meshes import collectives, mesh_of, on
from tests.pallas_kernels.test_transformations import launches_and_loops

unchecked = inspect.unwrap(layer_norm)
by_kernel = partial(layer_norm, backend="interpret")
by_xla = partial(layer_norm, backend="xla")


def expected(x, scale, bias, dy, epsilon=1e-6):
    """(y, dx, d_scale, d_bias) in float64, and the norm of each had the signs of its terms averaged
    out: what rounding errors are relative to, where a sum happens to cancel."""
    centred = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    standard, scaled = centred / deviation, dy * scale
    across = (scaled * standard).mean(-1, keepdims=True)
    dx = (scaled - scaled.mean(-1, keepdims=True) - standard * across) / deviation
    rows = tuple(range(x.ndim - 1))
    results = standard * scale + bias, dx, (dy * standard).sum(rows), dy.sum(rows)
    terms = results[0], scaled / deviation, dy * standard, dy
    return results, [float(np.linalg.norm(each)) for each in terms]


def arguments(shape, dtype=jnp.float32, parameters=jnp.float32, origin=0.0):
    """x, scale, bias and dy."""
    shapes = (shape, shape[-1:], shape[-1:], shape)
    x, scale, bias, dy = (normal(seed, shape) for seed, shape in enumerate(shapes))
    return [
        (x + origin).astype(dtype),
        scale.astype(parameters),
        bias.astype(parameters),
        dy.astype(dtype),
    ]


def result_and_gradients(function, x, scale, bias, dy):
    y, pull = jax.vjp(function, x, scale, bias)
    return y, *pull(dy)


def worst_error(function, operands, **options):
    """Of a result and its gradients."""
    actual = quick_jit(partial(result_and_gradients, partial(function, **options)))(*operands)
    errors = []
    like = [operands[0], *operands[:3]]
    for each, exact, norm, operand in zip(
        actual, *expected(*map(float64, operands)), like, strict=True
    ):
        assert (each.shape, each.dtype) == (operand.shape, operand.dtype)
        errors.append(distance(each, exact, norm))
    return max(errors)


dtypes = st.sampled_from([jnp.float32, jnp.float16, jnp.bfloat16])
some_blocks = st.none() | st.builds(
    Blocks,
    st.sampled_from([16, 32]),
    st.just(64),
    st.just(16),
    st.sampled_from([1, 2, 4]),
    splits=st.integers(1, 4),
    group=st.sampled_from([1, 2, 8]),
)


@pytest.mark.parametrize("draws", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_drawn_rows(draws):
    @settings(max_examples=draws, phases=[Phase.generate])
    @given(
        batch=st.lists(st.sampled_from([1, 2, 3, 17, 40]), max_size=2).map(tuple),
        d=st.sampled_from([2, 16, 47, 64]) | st.integers(2, 64),
        dtype=dtypes,
        parameters=dtypes,
        blocks=some_blocks,
    )
    def each(batch, d, dtype, parameters, blocks):
        operands = arguments((*batch, d), dtype, parameters)
        allowed = max(TOLERANCE[jnp.dtype(each).name] for each in (dtype, parameters))
        assert worst_error(by_kernel, operands, blocks=blocks) <= allowed
        assert worst_error(by_xla, operands) <= allowed

    each()


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_rows_far_from_zero_lose_nothing(backend):
    operands = arguments((9, 100), origin=1e4)
    assert worst_error(layer_norm, operands, backend=backend) <= 1e-6 * 5


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_one_bad_row_stays_alone_and_one_column_is_the_bias(backend):
    x, scale, bias, _ = arguments((3, 20))
    call = quick_jit(partial(layer_norm, backend=backend))
    y = call(x.at[1, 7].set(jnp.nan), scale, bias)
    assert jnp.isnan(y[1]).all()
    np.testing.assert_array_equal(y[::2], call(x, scale, bias)[::2])
    np.testing.assert_array_equal(call(x[:, :1], scale[:1], bias[:1]), jnp.tile(bias[:1], (3, 1)))


@pytest.mark.parametrize("shape", [(3, 0), (2, 0, 4)])
@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_no_rows_and_no_columns(shape, backend):
    operands = arguments(shape)
    y, dx, d_scale, d_bias = result_and_gradients(partial(layer_norm, backend=backend), *operands)
    assert y.shape == dx.shape == shape
    assert not d_scale.any()
    assert not d_bias.any()


def test_xla_has_float64():
    x, scale, bias, dy = arguments((4, 6))
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(each), jnp.float64) for each in (x, scale, bias)]
        y = layer_norm(*wide)
        assert y.dtype == jnp.float64
        exact = expected(*map(np.asarray, wide), np.asarray(dy))[0][0]
        np.testing.assert_allclose(y, exact, rtol=1e-12)


def test_xla_has_both_modes():
    def by_hand(x, scale, bias):
        centred = x - x.mean(-1, keepdims=True)
        variance = jnp.mean(centred**2, -1, keepdims=True)
        return centred / jnp.sqrt(variance + 1e-6) * scale[None] + bias[None]

    # Forward mode over reverse mode.
    actual, wanted = (
        quick_jit(jax.hessian(squares(f), (0, 1, 2)))(*arguments((2, 6))[:3])
        for f in (by_xla, by_hand)
    )
    for each, exact in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        assert_close(each, float64(exact), 2e-5)


@pytest.mark.parametrize("function", [by_kernel, by_xla])
def test_the_backward_pass_is_given_x_and_a_few_numbers_a_row(function):
    x, scale, bias, _ = arguments((50, 64), jnp.bfloat16)
    _, pull = jax.eval_shape(partial(jax.vjp, function), x, scale, bias)
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull))
    assert kept <= 2 * x.size + 4 * (3 * len(x) + 2 * scale.size)


def test_sums_over_rows_are_the_same_every_time():
    operands = arguments((200, 16))
    blocks = Blocks(16, 16, 16, splits=4, group=2)
    call = partial(result_and_gradients, partial(by_kernel, blocks=blocks))
    assert "f32[1,4,2,16]" in str(jax.make_jaxpr(call)(*operands))
    call = quick_jit(call)
    for first, second in zip(call(*operands), call(*operands), strict=True):
        np.testing.assert_array_equal(first, second)


# Transformations


def squares(function):
    return lambda *operands: jnp.sum(function(*operands) ** 2)


def gradients(function):
    return jax.grad(squares(function), (0, 1, 2))


def of_checkpoint_in_a_scan(function):
    def run(x, scale, bias):
        def step(x, _):
            return jax.checkpoint(function)(x, scale, bias), None

        return jax.lax.scan(step, x, None, 2)[0]

    return gradients(run)


def of_gradients(function):
    def loss(*operands):
        return sum(jnp.sum(each**3) for each in gradients(function)(*operands))

    return jax.grad(loss, (0, 1, 2))


def of_vectors(function):
    return gradients(jax.vmap(jax.vmap(function, (0, None, None)), (0, None, None)))


def of_own_parameters(function):
    each = jax.vmap(function, (None, 0, 0))
    return jax.vmap(gradients(lambda x, *rest: each(x, *(jnp.stack([r, 2 * r]) for r in rest))))


TRANSFORMATIONS = {
    "checkpoint in a scan": (of_checkpoint_in_a_scan, ()),
    "gradients of gradients": (of_gradients, ()),
    "a vmap of vectors": (of_vectors, ()),
    "a vmap of all operands": (of_own_parameters, (2,)),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations(name):
    transform, lead = TRANSFORMATIONS[name]
    operands = [normal(seed, (*lead, *s)) for seed, s in enumerate([(3, 5, 12), (12,), (12,)])]
    actual, wanted = (quick_jit(transform(f))(*operands) for f in (by_kernel, by_xla))
    for each, exact in zip(actual, wanted, strict=True):
        assert_close(each, float64(exact), 1e-5)


def test_a_batch_of_vectors_is_one_launch():
    vectors = jax.vmap(jax.vmap(by_kernel, (0, None, None)), (0, None, None))
    jaxpr = jax.make_jaxpr(gradients(vectors))(*arguments((3, 5, 12))[:3])
    assert list(launches_and_loops(jaxpr.jaxpr)) == ["pallas_call"] * 2


@pytest.mark.parametrize("mode", [jax.jacfwd, lambda f: jax.hessian(squares(f))])
def test_forward_mode_is_refused(mode):
    with pytest.raises(NotImplementedError, match="no forward-mode derivative: use backend='xla'"):
        mode(by_kernel)(*arguments((2, 4))[:3])


# Meshes


@pytest.mark.parametrize(
    ("axis_type", "spec"),
    [
        (AxisType.Auto, P("data")),
        (AxisType.Auto, P("data", "model")),
        (AxisType.Explicit, P("data")),
    ],
)
def test_rows_stay_split(axis_type, spec):
    operands, mesh = arguments((8, 6, 12)), mesh_of(4, 2, axis_type=axis_type)
    split = on(mesh, operands, (spec, P(), P(), spec))
    run = partial(result_and_gradients, by_kernel)
    with jax.set_mesh(mesh):
        compiled = quick_jit(run).lower(*split).compile()
        actual = compiled(*split)
    assert set(collectives(compiled)) == {"all-reduce"}
    for each, wanted in zip(actual, expected(*map(float64, operands))[0], strict=True):
        assert_close(each, wanted, 1e-5)
    assert actual[1].sharding.is_equivalent_to(split[0].sharding, 3)


def test_split_columns_are_gathered():
    operands, mesh = arguments((8, 16)), mesh_of(8)
    split = on(mesh, operands[:3], (P(None, "data"), P("data"), P("data")))
    compiled = quick_jit(by_kernel).lower(*split).compile()
    assert "all-gather" in collectives(compiled)
    assert_close(compiled(*split), expected(*map(float64, operands))[0][0], 1e-5)


def test_a_shard_map_that_follows_what_varies_sums_the_gradients_of_scale_and_bias():
    x, scale, bias, _ = arguments((8, 16))
    run = jax.shard_map(
        gradients(partial(layer_norm, backend="triton")),
        mesh=mesh_of(8),
        in_specs=(P("data"), P(), P()),
        out_specs=(P("data"), P(), P()),
    )
    assert str(jax.make_jaxpr(run)(x, scale, bias)).count("psum") >= 2


# Lowering

H200 = AbstractMesh(
    (1,), ("device",), (AxisType.Auto,), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda")
)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((197, 192), jnp.bfloat16),
        ((3, 5, 100), jnp.float16),
        ((50432, 1280), jnp.float32),
        ((7, 4096), jnp.bfloat16),
        ((1, 1), jnp.float32),
    ],
)
def test_kernels_lower_for_a_gpu(shape, dtype):
    operands = [jax.ShapeDtypeStruct(s, dtype) for s in (shape, shape[-1:], shape[-1:], shape)]
    with jax.sharding.use_abstract_mesh(H200):
        lowered = jax.jit(partial(result_and_gradients, layer_norm)).trace(*operands)
        program = lowered.lower(lowering_platforms=("cuda",)).as_text()
    names = re.findall(r' name = "(\w+)", num_stages', program)
    assert names == ["layer_norm", "layer_norm_gradients"]


def test_auto_leaves_long_rows_to_xla():
    x, scale, bias = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 5000), (5000,), (5000,)))
    with jax.sharding.use_abstract_mesh(H200):
        assert "pallas_call" not in str(jax.make_jaxpr(layer_norm)(x, scale, bias))
    with pytest.raises(NotImplementedError, match=r"d=5000 have no kernel: .* backend='xla'"):
        jax.eval_shape(partial(layer_norm, backend="triton"), x, scale, bias)


@pytest.mark.parametrize("shape", [(1, 1), (50432, 768), (197, 4096), (64, 192)])
def test_blocks_to_try(shape):
    found = search_space(shape, jnp.bfloat16)
    assert found[0] == default_blocks(shape, jnp.bfloat16)
    assert len(found) == len(set(found)) > 3
    assert all(each.n >= shape[1] and each.group <= each.m for each in found)


# Errors


@pytest.mark.parametrize(
    ("shapes", "options", "error", "message"),
    [
        ([(), (1,), (1,)], {}, ValueError, r"x of shape \(\) must have an axis"),
        ([(2, 3), (2,), (3,)], {}, ValueError, r"scale of shape \(2,\) must be \(3,\)"),
        ([(2, 3), (3,), (1, 3)], {}, ValueError, r"bias of shape \(1, 3\) must be \(3,\)"),
        ([(2, 3), (3,), (3,)], {"epsilon": -1.0}, ValueError, "epsilon=-1.0 must not be negative"),
        ([(2, 3), (3,), (3,)], {"backend": "cuda"}, ValueError, "backend='cuda' must be one of"),
        (
            [(2, 30), (30,), (30,)],
            {"backend": "interpret", "blocks": Blocks(16, 16, 16)},
            ValueError,
            "blocks of n=16 must hold a row, of d=30",
        ),
        (
            [(2, 3), (3,), (3,)],
            {"backend": "interpret", "blocks": replace(Blocks(16, 16, 16), group=3)},
            ValueError,
            "blocks of group=3 must be a power of two",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_does_not_fit_is_refused(shapes, options, error, message):
    with pytest.raises(error, match=message):
        unchecked(*map(jnp.zeros, shapes), **options)


@pytest.mark.usefixtures("unchecked")
def test_integers_are_refused():
    with pytest.raises(TypeError, match="x of dtype int32 must be floating"):
        unchecked(jnp.zeros((2, 3), int), jnp.zeros(3), jnp.zeros(3))
