"""matmul_fp8 against float64 numpy of the same 8-bit numbers, and what steps do to its scales."""

import inspect
import os
import re
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import Blocks
from pallas_kernels.calls import Matmul
from pallas_kernels.float8 import E4M3, E5M2, Scale, ScaleState
from pallas_kernels.inspect import sass
from pallas_kernels.inspect.architectures import ARCHITECTURES
from pallas_kernels.inspect.compiler import CompilerError, compile_kernel
from pallas_kernels.inspect.lowering import lower
from pallas_kernels.inspect.roofline import default_gpu
from pallas_kernels.matmul_fp8 import default_blocks, matmul_fp8, reference, search_space
from tests.compiling import quick_jit
from tests.pallas_kernels.arrays import assert_close, distance, float64, normal
from tests.pallas_kernels.references import ACTIVATIONS, TOLERANCE, slope
from tests.pallas_kernels.test_lowering import kernels
from tests.pallas_kernels.test_transformations import launches_and_loops

BACKENDS = ["xla", "interpret"]
FEW, MANY = int(os.environ.get("CONVJAX_DRAWS", "5")), 500


TYPES = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}


def scaled_to(*arrays):
    """The state in which each array fills its type: a, b and the gradient of the result."""
    largest = [np.abs(np.asarray(x, np.float32)).max(initial=1e-6) for x in arrays]
    scales = np.divide(largest, [448, 448, 57344]).astype(np.float32)
    return ScaleState(*(Scale(jnp.asarray(scale), jnp.zeros(4)) for scale in scales))


def rounded(x, scale, dtype):
    """What an array is quantised to, in float64."""
    scaled = np.asarray(x, np.float32) / np.asarray(scale.scale)
    return scaled.astype(TYPES[dtype]).astype(np.float64) * float(scale.scale)


@partial(quick_jit, static_argnames=("activation", "backend", "blocks"))
def result_and_gradients(a, b, dy, state, *, bias=None, **options):
    """(y, da, db, d_bias, the next state)."""

    def call(a, b, bias, state):
        return matmul_fp8(a, b, state, bias=bias, **options)

    y, pull = jax.vjp(call, a, b, bias, state)
    return y, *pull(dy)


blocks = st.none() | st.builds(
    Blocks, *[st.sampled_from([16, 32])] * 3, splits=st.integers(1, 3), group=st.integers(1, 3)
)


@pytest.mark.parametrize("draws", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_products_are_those_of_the_rounded_numbers(draws):
    # Without shrinking: what is drawn is small, and to compile it takes seconds.
    @settings(max_examples=draws, phases=[Phase.generate])
    @given(
        shape=st.tuples(st.integers(1, 70), st.integers(1, 150), st.integers(1, 70)),
        dtype=st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]),
        activation=st.sampled_from(list(ACTIVATIONS)),
        biased=st.booleans(),
        blocks=blocks,
        backend=st.sampled_from(["interpret", "interpret", "xla"]),
    )
    def check(shape, dtype, activation, biased, blocks, backend):
        m, k, n = shape
        a, b, dy = normal(0, (m, k), dtype), normal(1, (k, n), dtype), normal(2, (m, n), dtype)
        bias = normal(3, (n,), dtype) if biased else None
        state = scaled_to(a, b, dy)
        options = {"activation": activation, "backend": backend}
        options |= {"blocks": blocks} if backend == "interpret" else {}
        y, da, db, d_bias, _ = result_and_gradients(a, b, dy, state, bias=bias, **options)

        q_a, q_b = rounded(a, state.a, E4M3), rounded(b, state.b, E4M3)
        z = q_a @ q_b + (float64(bias) if biased else 0)
        tolerance = TOLERANCE[dtype.__name__]
        assert_close(y, ACTIVATIONS[activation](z), tolerance, np.linalg.norm(z))
        slopes = slope(activation, float64(y) if activation == "relu" else z)
        if activation is None:
            dz = float64(dy)
            q_dz = rounded(dy, state.gradient, E5M2)
            assert_close(da, q_dz @ q_b.T, tolerance)
            assert_close(db, q_a.T @ q_dz, tolerance)
        else:  # a rounding error in dz may move it to the next of e5m2's numbers
            dz = float64(dy) * slopes
            scale = max(np.linalg.norm(dz), 1e-30)
            assert_close(da, dz @ q_b.T, 0.1, scale * np.linalg.norm(q_b))
            assert_close(db, q_a.T @ dz, 0.1, scale * np.linalg.norm(q_a))
        if biased:
            assert_close(d_bias, dz.sum(0), tolerance, np.linalg.norm(dz) * np.sqrt(m))

    check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_reference(backend):
    a, b, bias = normal(0, (5, 40)), normal(1, (40, 7)), normal(2, (7,))
    state = scaled_to(a, b, a)
    call = partial(matmul_fp8, activation="silu", backend=backend)
    y = quick_jit(call)(a, b, state, bias=bias)
    expected = reference(a, b, state, bias=bias, activation="silu")
    assert_close(y, float64(expected), 1e-5)


def test_how_far_rounding_takes_a_product_and_its_gradients():
    a, b, dy = normal(0, (64, 256)), normal(1, (256, 48)), normal(2, (64, 48))
    y, da, db, _, _ = result_and_gradients(a, b, dy, scaled_to(a, b, dy), backend="xla")
    exact_a, exact_b, exact_dy = map(float64, (a, b, dy))
    assert 0.03 < distance(y, exact_a @ exact_b) < 0.045
    assert 0.05 < distance(da, exact_dy @ exact_b.T) < 0.07
    assert 0.05 < distance(db, exact_a.T @ exact_dy) < 0.07


@pytest.mark.parametrize(
    ("backend", "shape"),
    [("xla", (4, 0, 2)), *[("interpret", x) for x in [(0, 3, 2), (4, 0, 2), (4, 3, 0), (1, 1, 1)]]],
)
def test_products_without_elements_or_with_one(backend, shape):
    m, k, n = shape
    a, b, dy, bias = jnp.ones((m, k)), jnp.ones((k, n)), jnp.ones((m, n)), jnp.ones(n)
    state = ScaleState.create()
    y, da, db, d_bias, following = result_and_gradients(
        a, b, dy, state, bias=bias, activation="relu", backend=backend
    )
    np.testing.assert_array_equal(y, np.full((m, n), k + 1.0))
    assert (da.shape, db.shape) == (a.shape, b.shape)
    np.testing.assert_array_equal(d_bias, np.full(n, m))
    assert jax.tree.all(jax.tree.map(lambda leaf: bool(jnp.isfinite(leaf).all()), following))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_finite_shows_and_leaves_the_scales_alone(backend):
    a, b = jnp.ones((3, 4)).at[1, 2].set(jnp.inf), jnp.ones((4, 2))
    state = scaled_to(b, b, b)
    y, _, _, _, following = result_and_gradients(a, b, jnp.ones((3, 2)), state, backend=backend)
    np.testing.assert_array_equal(np.isnan(y), [[False] * 2, [True] * 2, [False] * 2])
    assert float(following.a.scale) == float(state.a.scale)


def test_the_states_gradient_is_the_next_state():
    a, b, dy = normal(0, (6, 5)), 3 * normal(1, (5, 4)), 1e-3 * normal(2, (6, 4))
    *_, following = result_and_gradients(a, b, dy, ScaleState.create(2))
    largest = [float(jnp.abs(x).max()) for x in (a, b, dy)]
    scales = [float(each.scale) for each in following]
    np.testing.assert_allclose(scales, np.divide(largest, [448, 448, 57344]), rtol=1e-6)
    histories = [each.history.tolist() for each in following]
    np.testing.assert_allclose(histories, [[each, 0] for each in largest])


@pytest.mark.parametrize("activation", ["gelu"])
def test_the_gradients_scale_is_chosen_by_what_is_quantised(activation):
    """That is the gradient of the activation's argument."""
    a, b, dy = normal(0, (6, 5)), normal(1, (5, 4)), normal(2, (6, 4))
    state = scaled_to(a, b, dy)
    *_, following = result_and_gradients(a, b, dy, state, activation=activation)
    z = rounded(a, state.a, E4M3) @ rounded(b, state.b, E4M3)
    largest = np.abs(float64(dy) * slope(activation, z)).max()
    assert float(following.gradient.history[0]) == pytest.approx(largest, rel=1e-5)


def test_a_sudden_growth_saturates_for_one_step():
    b, dy, state, errors = normal(1, (32, 8)), normal(2, (16, 8)), ScaleState.create(4), []
    for step, factor in enumerate([1, 1, 1, 50, 50, 50]):
        a = factor * normal(10 + step, (16, 32))
        y, _, _, _, state = result_and_gradients(a, b, dy, state)
        errors.append(distance(y, float64(a) @ float64(b)))
    assert max(errors[1:3] + errors[4:]) < 0.06
    assert errors[3] > 0.5


def test_training():
    """Two layers learn a smooth function, and their scales come to what the arrays need."""
    x = normal(0, (64, 16))
    target = jnp.sin(x @ normal(1, (16, 4)) / 4)
    parameters = [0.3 * normal(2, (16, 32)), 0.3 * normal(3, (32, 4))]
    states = [ScaleState.create(4)] * 2

    def loss(parameters, states):
        hidden = matmul_fp8(x, parameters[0], states[0], activation="gelu_tanh")
        y = matmul_fp8(hidden, parameters[1], states[1])
        return jnp.mean((y - target) ** 2)

    @jax.jit
    def step(carry, _):
        value, (gradients, states) = jax.value_and_grad(loss, (0, 1))(*carry)
        parameters = [p - 0.3 * g for p, g in zip(carry[0], gradients, strict=True)]
        return (parameters, states), value

    (_, states), losses = jax.lax.scan(step, (parameters, states), length=60)
    assert losses[-1] < losses[0] / 4
    for state in states:
        for scale, dtype in zip(state, (E4M3, E4M3, E5M2), strict=True):
            largest = float(scale.scale) * float(jnp.finfo(dtype).max)
            assert largest == pytest.approx(float(scale.history.max()), rel=1e-5)


def stacked(tree):
    return jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf, 3 * leaf]), tree)


def gradients(a, b, bias, state, *, backend):
    def loss(a, b, bias):
        y = matmul_fp8(a, b, state, bias=bias, activation="silu", backend=backend)
        return jnp.sum(y**2)

    return jax.grad(loss, (0, 1, 2))(a, b, bias)


@pytest.mark.parametrize("moving", [(0,), (0, 1, 2, 3)])
def test_vmap_of_a_product_is_one_launch_and_gives_what_a_loop_gives(moving):
    operands = (normal(0, (6, 5)), normal(1, (5, 4)), normal(2, (4,)), ScaleState.create(2))
    operands = tuple(stacked(x) if i in moving else x for i, x in enumerate(operands))
    axes = tuple(0 if i in moving else None for i in range(4))
    many = jax.vmap(partial(gradients, backend="interpret"), axes)
    assert list(launches_and_loops(jax.make_jaxpr(many)(*operands))) == ["pallas_call"] * 3
    found, one = quick_jit(many)(*operands), quick_jit(partial(gradients, backend="xla"))
    for element in range(3):
        own = [
            jax.tree.map(lambda leaf, element=element: leaf[element], x) if i in moving else x
            for i, x in enumerate(operands)
        ]
        for actual, expected in zip(found, one(*own), strict=True):
            assert_close(actual[element], float64(expected), 1e-5)


def test_vmap_of_vmap_and_scan_and_remat():
    a, b, state = normal(0, (6, 5)), normal(1, (5, 4)), ScaleState.create(2)

    def loss(backend):
        @jax.checkpoint
        def layer(a, layer_state):
            return matmul_fp8(a, b, layer_state, backend=backend)[:, :1] * jnp.ones((1, 5)), None

        def run(a, states):
            y, _ = jax.lax.scan(layer, a, states)
            one = partial(matmul_fp8, b=b, state=state, backend=backend)
            return jnp.sum(y) + jnp.sum(jax.vmap(jax.vmap(one))(stacked(stacked(a))) ** 2)

        return quick_jit(jax.grad(run, (0, 1)))

    operands = a, stacked(state)
    for actual, expected in zip(
        *(jax.tree.leaves(loss(backend)(*operands)) for backend in ("interpret", "xla")),
        strict=True,
    ):
        assert_close(actual, float64(expected), 1e-5)


def mesh_of(axis_type=AxisType.Auto):
    return jax.make_mesh((8,), ("data",), axis_types=(axis_type,))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_rows_stay_split_and_one_scale_is_for_all(axis_type):
    mesh = mesh_of(axis_type)
    a, b, dy = normal(0, (64, 8)), normal(1, (8, 16)), normal(2, (64, 16))
    state = scaled_to(a, b, dy)
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def run(a, b, dy, state):
        y, pull = jax.vjp(partial(matmul_fp8, activation="relu", backend="interpret"), a, b, state)
        return y, *pull(dy)

    split = [
        jax.device_put(x, s)
        for x, s in zip((a, b, dy, state), (rows, whole, rows, whole), strict=True)
    ]
    with jax.set_mesh(mesh):
        compiled = quick_jit(run).lower(*split).compile()
    assert not re.search(r"all-gather|all-to-all|collective-permute", compiled.as_text())
    found = compiled(*split)
    assert found[0].sharding.is_equivalent_to(rows, 2)
    assert found[1].sharding.is_equivalent_to(rows, 2)
    alone = quick_jit(run)(a, b, dy, state)
    for actual, expected in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
        assert_close(actual, float64(expected), 1e-5)


def test_shard_map_finds_the_scale_of_all_devices():
    a, b, state = normal(0, (64, 8)), normal(1, (8, 16)), ScaleState.create(2)

    @partial(jax.grad, argnums=(0, 1, 2))
    def gradient(a, b, state):
        return jnp.sum(matmul_fp8(a, b, state, backend="xla") ** 2)

    specs = P("data"), P(), P()
    mapped = jax.shard_map(gradient, mesh=mesh_of(), in_specs=specs, out_specs=specs)
    for actual, expected in zip(
        jax.tree.leaves(quick_jit(mapped)(a, b, state)),
        jax.tree.leaves(quick_jit(gradient)(a, b, state)),
        strict=True,
    ):
        assert_close(actual, float64(expected), 1e-5)


def test_a_batch_is_rows_of_one_product():
    a, b, state = normal(0, (2, 3, 8)), normal(1, (8, 4)), ScaleState.create()
    product = quick_jit(matmul_fp8)
    rows = product(a.reshape(6, 8), b, state)
    np.testing.assert_array_equal(product(a, b, state), rows.reshape(2, 3, 4))


def test_results_and_gradients_have_the_operands_dtypes():
    a, b, state = normal(0, (4, 8), jnp.bfloat16), normal(1, (8, 4)), ScaleState.create()
    y, pull = jax.eval_shape(partial(jax.vjp, matmul_fp8), a, b, state)
    assert y.dtype == jnp.float32
    da, db, _ = jax.eval_shape(lambda pull, dy: pull(dy), pull, y)
    assert (da.dtype, db.dtype) == (jnp.bfloat16, jnp.float32)
    half = jax.eval_shape(partial(matmul_fp8, out_dtype=jnp.float16), a, b, state)
    assert half.dtype == jnp.float16


def test_a_byte_a_number_is_kept():
    a, b = (jax.ShapeDtypeStruct((64, 64), jnp.bfloat16) for _ in range(2))
    _, pull = jax.eval_shape(partial(jax.vjp, matmul_fp8), a, b, ScaleState.create())
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull))
    assert 2 * 64 * 64 <= kept < 2 * 64 * 64 + 1000


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_derivatives_are_refused(backend):
    a, b, state = jnp.ones((2, 3)), jnp.ones((3, 2)), ScaleState.create()

    def loss(a):
        return jnp.sum(matmul_fp8(a, b, state, backend=backend) ** 2)

    with pytest.raises(NotImplementedError, match="matmul_fp8 has first derivatives only"):
        jax.eval_shape(jax.grad(lambda a: jnp.sum(jax.grad(loss)(a))), a)
    with pytest.raises(NotImplementedError, match="matmul_fp8 has first derivatives only"):
        jax.eval_shape(jax.hessian(loss), a)
    with pytest.raises(TypeError, match=r"forward-mode .* to a custom_vjp function"):
        jax.jvp(loss, (a,), (a,))


# The tests' type checker would object first to what it can see.
unchecked = inspect.unwrap(matmul_fp8)


@pytest.mark.parametrize(
    ("error", "message", "a", "b", "options"),
    [
        (ValueError, r"a of shape \(2, 3\) and b of \(4, 2\) must be", (2, 3), (4, 2), {}),
        (ValueError, r"must be \[..., m, k\] and \[k, n\]", (3,), (3, 2), {}),
        (ValueError, r"b of \(2, 3, 2\) must be", (2, 2, 3), (2, 3, 2), {}),
        (ValueError, r"bias of shape \(3,\)", (2, 3), (3, 2), {"bias": jnp.ones(3)}),
        (ValueError, "activation='elu'", (2, 3), (3, 2), {"activation": "elu"}),
        (ValueError, "backend='cuda'", (2, 3), (3, 2), {"backend": "cuda"}),
        (ValueError, "blocks=.* must be None", (2, 3), (3, 2), {"blocks": Blocks(64, 64, 64)}),
        (TypeError, "state of type float must be", (2, 3), (3, 2), {"state": 1.0}),
        (NotImplementedError, "needs an NVIDIA GPU", (2, 3), (3, 2), {"backend": "triton"}),
    ],
)
def test_arguments_that_do_not_fit(error, message, a, b, options):
    options = {"state": ScaleState.create(), **options}
    with pytest.raises(error, match=message):
        unchecked(jnp.ones(a), jnp.ones(b), **options)


def test_integers_are_refused():
    with pytest.raises(TypeError, match="a of dtype int32 must be floating"):
        unchecked(jnp.ones((2, 3), jnp.int32), jnp.ones((3, 2)), ScaleState.create())


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(
    ("shape", "activation"), [((37, 77, 21), "gelu"), ((512, 1024, 512), "relu")]
)
def test_triton_can_lower_all_three_products(shape, activation):
    m, k, n = shape

    def run(a, b, bias, dy):
        def call(a, b, bias):
            state = ScaleState.create()
            return matmul_fp8(a, b, state, bias=bias, activation=activation, backend="triton")

        y, pull = jax.vjp(call, a, b, bias)
        return y, pull(dy)

    assert kernels(run, (m, k), (k, n), (n,), (m, n)) == ["matmul_fp8"] * 3


class Fp8Product(Matmul):
    def function(self, **options):
        return lambda a, b: matmul_fp8(a, b, ScaleState.create(), **options)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(
    ("architecture", "which", "instruction"),
    [
        ("sm_90", "kernel_gradient", "QGMMA"),
        ("sm_100", "input_gradient", "UTCQMMA"),
        ("sm_80", "forward", None),
    ],
)
def test_matrix_instructions_are_those_of_fp8(architecture, which, instruction):
    pytest.importorskip("triton")
    product = Fp8Product((512, 1024), (1024, 512))
    (found,) = lower(product, which, default_gpu(architecture)).launches
    compiled = partial(compile_kernel, found.ttir, warps=found.warps, stages=found.stages)
    if instruction is None:
        with pytest.raises(CompilerError, match="no machine code for sm_80"):
            compiled(architecture=ARCHITECTURES[architecture])
    else:
        binary = compiled(architecture=ARCHITECTURES[architecture])
        assert list(sass.count(sass.parse(binary.sass))) == [instruction]
        assert binary.spill_bytes == 0


@pytest.mark.parametrize("shape", [(1, 1, 1), (4096,) * 3, (16, 1000, 65536), (12608, 3072, 768)])
def test_blocks_to_try(shape):
    found = search_space(shape)
    assert found[0] == default_blocks(shape)
    assert len(set(found)) == len(found)
    for each in found:
        assert each.m >= 64
        assert each.k >= 32
