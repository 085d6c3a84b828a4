"""cross_entropy against values worked out by hand and a float64 softmax, by XLA and by kernels."""

import inspect
import math
import re
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
from pallas_kernels.cross_entropy import cross_entropy, default_blocks, search_space
from tests.compiling import quick_jit
from tests.pallas_kernels.arrays import assert_close, float64, normal
from tests.pallas_kernels.references import TOLERANCE
from tests.pallas_kernels.test_kernels import FEW, MANY
from tests.pallas_kernels.test_meshes import collectives, mesh_of, on
from tests.pallas_kernels.test_transformations import launches_and_loops

BACKENDS = ["xla", "interpret"]


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


@settings(max_examples=FEW)
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

    @quick_jit
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
    with pytest.raises(NotImplementedError, match="backend='triton' needs an NVIDIA GPU"):
        cross_entropy(jnp.zeros((2, 3)), jnp.zeros(2, int), backend="triton")
    with pytest.raises(ValueError, match="backend='cuda' must be one of"):
        unchecked(jnp.zeros((2, 3)), jnp.zeros(2, int), backend="cuda")
    blocks = Blocks(16, 16, 16, group=3)
    with pytest.raises(ValueError, match="blocks of group=3 must be a power of two"):
        unchecked(jnp.zeros((2, 3)), jnp.zeros(2, int), backend="interpret", blocks=blocks)
    float8 = jnp.zeros((2, 3), jnp.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match=r"float8_e4m3fn have no kernel: .*='xla' takes"):
        cross_entropy(float8, jnp.zeros(2, int), backend="triton")


def test_weights_must_fit_and_be_floating():
    with pytest.raises(ValueError, match=r"weights of shape \(3,\) must be labels' shape \(2,\)"):
        unchecked(jnp.zeros((2, 3)), jnp.zeros(2, int), weights=jnp.zeros(3))
    with pytest.raises(TypeError, match="weights of dtype int32 must be floating"):
        unchecked(jnp.zeros((2, 3)), jnp.zeros(2, int), weights=jnp.zeros(2, int))
    with pytest.raises(TypeError, match="logits of dtype int32 must be floating"):
        unchecked(jnp.zeros((2, 3), int), jnp.zeros(2, int))


# Kernels, weights and gradients


def expected(logits, labels, weights, d_loss, smoothing):
    """The loss and the gradients of logits and weights, in float64."""
    below = logits - logits.max(-1, keepdims=True)
    log_p = below - np.log(np.exp(below).sum(-1, keepdims=True))
    classes = logits.shape[-1]
    target = (1 - smoothing) * np.eye(classes)[labels] + smoothing / classes
    loss = -np.sum(target * log_p, -1)
    slope = (weights * d_loss)[..., None] * (np.exp(log_p) - target)
    return weights * loss, slope, d_loss * loss


def arguments(batch, classes, dtype=jnp.float32, origin=0.0):
    """Logits, labels, weights and the loss's cotangent."""
    logits = (3 * normal(0, (*batch, classes)) + origin).astype(dtype)
    labels = jnp.asarray(np.random.default_rng(1).integers(0, classes, batch))
    return logits, labels, normal(2, batch), normal(3, batch)


def loss_and_gradients(logits, labels, weights, d_loss, **options):
    loss, pull = jax.vjp(
        lambda logits, weights: cross_entropy(logits, labels, weights=weights, **options),
        logits,
        weights,
    )
    return loss, *pull(d_loss)


def assert_agrees(operands, smoothing, **options):
    run = quick_jit(partial(loss_and_gradients, label_smoothing=smoothing, **options))
    logits, labels, *of_examples = operands
    exact = float64(logits), np.asarray(labels), *map(float64, of_examples)
    actual = run(*operands)
    for each, like, wanted in zip(
        actual, (of_examples[0], logits, of_examples[0]), expected(*exact, smoothing), strict=True
    ):
        assert (each.shape, each.dtype) == (like.shape, like.dtype)
        assert_close(each, wanted, TOLERANCE[each.dtype.name])


@pytest.mark.parametrize("draws", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_drawn_losses(draws):
    @settings(max_examples=draws, phases=[Phase.generate])
    @given(
        batch=st.lists(st.sampled_from([1, 2, 3, 8, 17]), max_size=2).map(tuple),
        classes=st.sampled_from([1, 2, 10, 39, 101]) | st.integers(2, 150),
        smoothing=st.sampled_from([0.0, 0.1]),
        dtype=st.sampled_from([jnp.float32, jnp.float16, jnp.bfloat16]),
        blocks=st.none()
        | st.builds(partial(Blocks, 16, k=16), n=st.just(32), group=st.sampled_from([1, 4])),
    )
    def each(batch, classes, smoothing, dtype, blocks):
        operands = arguments(batch, classes, dtype)
        assert_agrees(operands, smoothing, backend="interpret", blocks=blocks)
        assert_agrees(operands, smoothing, backend="xla")

    each()


# Rows of an odd number of classes are read from where 16 bytes begin: in bfloat16 8 elements.
@pytest.mark.parametrize(
    ("rows", "classes", "dtype"),
    [(8, 79, jnp.bfloat16), (5, 67, jnp.float32)],
)
def test_rows_that_begin_anywhere(rows, classes, dtype):
    blocks = Blocks(16, 32, 16, group=1)
    assert_agrees(arguments((rows,), classes, dtype), 0.1, backend="interpret", blocks=blocks)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_added_to_all_logits_changes_nothing(backend):
    blocks = None if backend == "xla" else Blocks(16, 32, 16, group=2)
    assert_agrees(arguments((4,), 100, origin=1e4), 0.1, backend=backend, blocks=blocks)


@pytest.mark.parametrize("backend", BACKENDS)
def test_infinite_logits(backend):
    logits = jnp.array([[0, 1, -jnp.inf], [-jnp.inf] * 3, [jnp.inf, 0, 0], [0, jnp.nan, 0]])
    call = quick_jit(partial(cross_entropy, backend=backend))
    loss = call(logits, jnp.array([1, 0, 1, 0]))
    assert float(loss[0]) == pytest.approx(math.log1p(math.exp(-1)), rel=1e-6)
    assert not jnp.isfinite(loss[1:]).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_weight_of_zero_leaves_an_example_out(backend):
    logits, labels, weights, d_loss = arguments((5,), 7)
    weights = weights.at[jnp.array([0, 1, 2])].set(0.0)
    run = quick_jit(partial(loss_and_gradients, backend=backend, label_smoothing=0.1))
    clean = run(logits, labels, weights, d_loss)
    # A label that is no class, and logits that are no numbers; the third is like any other.
    bad = run(logits.at[1].set(jnp.nan), labels.at[0].set(-1), weights, d_loss)
    for loss, d_logits, d_weights in (clean, bad):
        assert not loss[:3].any()
        assert not d_logits[:3].any()
        assert jnp.isfinite(d_weights).all()
    for before, after in zip(clean, bad, strict=True):
        np.testing.assert_array_equal(before[2:], after[2:])
    np.testing.assert_array_equal(bad[2][:2], 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_label_that_is_no_class_has_no_gradient(backend):
    logits, labels, weights, d_loss = arguments((3,), 40)
    labels = labels.astype(jnp.int32).at[1].set(40)
    blocks = None if backend == "xla" else Blocks(16, 16, 16, group=1)
    loss, d_logits, _ = quick_jit(partial(loss_and_gradients, backend=backend, blocks=blocks))(
        logits, labels, weights, d_loss
    )
    np.testing.assert_array_equal(jnp.isnan(loss), [False, True, False])
    np.testing.assert_array_equal(d_logits.any(-1), [True, False, True])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,)])
def test_no_examples_and_no_classes(shape, backend):
    logits, labels = jnp.zeros(shape), jnp.zeros(shape[:-1], jnp.int32)
    loss, pull = jax.vjp(lambda z: cross_entropy(z, labels, backend=backend), logits)
    assert loss.shape == shape[:-1]
    assert jnp.isnan(loss).all()
    assert pull(loss)[0].shape == shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backward_pass_is_given_the_logits_and_a_few_numbers_an_example(backend):
    logits, labels, weights, _ = arguments((64,), 1000, jnp.bfloat16)
    call = partial(cross_entropy, label_smoothing=0.1, backend=backend)
    _, pull = jax.eval_shape(
        lambda *a: jax.vjp(lambda z, w: call(z, labels, weights=w), *a), logits, weights
    )
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull))
    assert kept <= logits.nbytes + 64 * 40


def test_no_array_of_xlas_is_float32_and_as_large_as_the_logits():
    logits, labels, _, d_loss = arguments((256,), 1000, jnp.bfloat16)

    def run(logits, d_loss):
        loss, pull = jax.vjp(
            lambda logits: cross_entropy(logits, labels, label_smoothing=0.1, backend="xla"), logits
        )
        return loss, *pull(d_loss)

    compiled = jax.jit(run).lower(logits, d_loss).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < logits.nbytes / 8


def test_xla_has_both_modes():
    logits, labels, weights, _ = arguments((3,), 5)

    def by_hand(logits, labels, weights):
        target = 0.9 * jax.nn.one_hot(labels, 5) + 0.1 / 5
        return jnp.sum((weights * jnp.sum(-target * jax.nn.log_softmax(logits), -1)) ** 2)

    # Forward mode over reverse mode.
    actual, wanted = (
        quick_jit(jax.hessian(loss, (0, 2)))(logits, labels, weights)
        for loss in (squares("xla"), by_hand)
    )
    for each, exact in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        assert_close(each, float64(exact), 1e-5)


# Transformations, meshes, lowering


def squares(backend):
    def loss(logits, labels, weights):
        losses = cross_entropy(
            logits, labels, weights=weights, label_smoothing=0.1, backend=backend
        )
        return jnp.sum(losses**2)

    return loss


def of_checkpoint_in_a_scan(loss):
    def run(logits, labels, weights):
        def step(total, factor):
            return total + jax.checkpoint(loss)(factor * logits, labels, weights), None

        return jax.lax.scan(step, 0.0, jnp.arange(1.0, 3.0))[0]

    return jax.grad(run, (0, 2))


def of_gradients(loss):
    def run(*operands):
        return sum(jnp.sum(each**2) for each in jax.grad(loss, (0, 2))(*operands))

    return jax.grad(run, (0, 2))


TRANSFORMATIONS = {
    "checkpoint in a scan": of_checkpoint_in_a_scan,
    "gradients of gradients": of_gradients,
    "a vmap of examples": lambda loss: jax.vmap(jax.grad(loss, (0, 2))),
    "a vmap of labels": lambda loss: jax.vmap(jax.grad(loss), (None, 1, None), 1),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations(name):
    logits, labels, weights, _ = arguments((3, 3), 11)
    if name == "a vmap of labels":
        logits, weights = logits[0], weights[0]
    actual, wanted = (
        quick_jit(TRANSFORMATIONS[name](squares(backend)))(logits, labels, weights)
        for backend in ("interpret", "xla")
    )
    for each, exact in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        assert_close(each, float64(exact), 1e-5)


def test_a_batch_is_one_launch():
    logits, labels, weights, _ = arguments((3, 4), 11)
    jaxpr = jax.make_jaxpr(jax.vmap(jax.grad(squares("interpret"))))(logits, labels, weights)
    assert list(launches_and_loops(jaxpr.jaxpr)) == ["pallas_call"] * 2


@pytest.mark.parametrize("mode", [jax.jacfwd, jax.hessian])
def test_forward_mode_is_refused(mode):
    logits, labels, weights, _ = arguments((2,), 5)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative: use backend='xla'"):
        mode(squares("interpret"))(logits, labels, weights)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_examples_stay_split(axis_type):
    operands, mesh = arguments((8, 2), 12), mesh_of(8, axis_type=axis_type)
    split = on(mesh, operands, [P("data")] * 4)
    run = partial(loss_and_gradients, backend="interpret")
    with jax.set_mesh(mesh):
        compiled = quick_jit(run).lower(*split).compile()
        actual = compiled(*split)
    assert collectives(compiled) == {}
    exact = float64(operands[0]), np.asarray(operands[1]), *map(float64, operands[2:])
    for each, wanted in zip(actual, expected(*exact, 0.0), strict=True):
        assert each.sharding.is_equivalent_to(split[2].sharding, each.ndim)
        assert_close(each, wanted, 1e-5)


def test_classes_stay_split_where_xla_computes():
    operands, mesh = arguments((4,), 64), mesh_of(8)
    split = on(mesh, operands, [P(None, "data"), P(), P(), P()])
    compiled = quick_jit(partial(loss_and_gradients, backend="xla")).lower(*split).compile()
    # A number an example and device goes around, for each of its sums.
    moved = re.findall(r"= f32\[([\d,]+)\]\S* all-", compiled.as_text())
    assert max(math.prod(map(int, shape.split(","))) for shape in moved) == 4 * 8
    exact = float64(operands[0]), np.asarray(operands[1]), *map(float64, operands[2:])
    actual = compiled(*split)
    assert actual[1].sharding.is_equivalent_to(split[0].sharding, 2)
    for each, wanted in zip(actual, expected(*exact, 0.0), strict=True):
        assert_close(each, wanted, 1e-5)


def test_a_kernel_gathers_split_classes():
    logits, labels, *_ = arguments((4,), 16)
    split = on(mesh_of(8), (logits, labels), (P(None, "data"), P()))
    compiled = quick_jit(partial(cross_entropy, backend="interpret")).lower(*split).compile()
    assert collectives(compiled) == {"all-gather": 1}
    assert_close(compiled(*split), float64(cross_entropy(logits, labels, backend="xla")), 1e-5)


H200 = AbstractMesh(
    (1,), ("device",), (AxisType.Auto,), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda")
)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(
    ("classes", "dtype"),
    [
        (1, jnp.float32),
        (10, jnp.float16),
        (1000, jnp.bfloat16),
        (21843, jnp.bfloat16),
        (50257, jnp.float32),
    ],
)
def test_kernels_lower_for_a_gpu(classes, dtype):
    batch = (16,) if classes < 1000 else (4096,)
    types = jnp.int32, jnp.float32, jnp.float32
    operands = [jax.ShapeDtypeStruct((*batch, classes), dtype)]
    operands += [jax.ShapeDtypeStruct(batch, each) for each in types]
    with jax.sharding.use_abstract_mesh(H200):
        run = partial(loss_and_gradients, label_smoothing=0.1)
        lowered = jax.jit(run).trace(*operands).lower(lowering_platforms=("cuda",))
    names = re.findall(r' name = "(\w+)", num_stages', lowered.as_text())
    assert names == ["cross_entropy", "cross_entropy_gradient"]


@pytest.mark.parametrize("shape", [(1, 1), (256, 1000), (8192, 50257), (100, 21843), (64, 10)])
def test_blocks_to_try(shape):
    found = search_space(shape, jnp.bfloat16)
    assert found[0] == default_blocks(shape, jnp.bfloat16)
    assert len(found) == len(set(found)) > 1
