"""The kernels, interpreted, under jax's transformations: they give what XLA's operations give."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Blocks, conv2d, conv2d_transpose, matmul
from tests.compiling import quick_jit
from tests.pallas_kernels.arrays import assert_close, float64, normal

BATCH_LAST = {"layout": "CHWN", "algorithm": "direct_chwn"}

# The operation, its options, the shapes of its two operands and of its result.
OPERATIONS = {
    "matmul": (matmul, {}, (6, 5), (5, 4), (6, 4)),
    "conv2d": (conv2d, {"strides": (2, 1)}, (2, 5, 4, 3), (3, 2, 3, 4), (2, 3, 4, 4)),
    "batch last": (conv2d, BATCH_LAST, (3, 5, 4, 2), (3, 2, 3, 4), (4, 5, 4, 2)),
    "transpose": (conv2d_transpose, {"strides": (2, 1)}, (2, 3, 2, 4), (3, 2, 3, 4), (2, 6, 2, 3)),
}


def operation(name, backend):
    """A function of operands by name, with a smooth activation."""
    function, options, *_ = OPERATIONS[name]
    if backend == "xla":
        options = {key: value for key, value in options.items() if key != "algorithm"}

    def call(operands):
        rest = {key: value for key, value in operands.items() if key not in ("left", "right")}
        options_of_all = {"activation": "silu", "backend": backend, **options}
        return function(operands["left"], operands["right"], **rest, **options_of_all)

    return call


def operands_of(name, lead=()):
    """All operands, each with the axes `lead` in front."""
    _, options, left, right, out = OPERATIONS[name]
    channels = out[options.get("layout", "NHWC").index("C") if len(out) == 4 else 1]
    shapes = {"left": left, "right": right, "bias": (channels,), "residual": out}
    return {key: normal(i, (*lead, *shape)) for i, (key, shape) in enumerate(shapes.items())}


def loss(function):
    return lambda operands: jnp.sum(function(operands) ** 2)


def squares(tree):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))


def through_a_scan(function):
    def run(operands):
        def step(total, scale):
            return total + function({**operands, "left": scale * operands["left"]}), None

        return jax.lax.scan(step, 0 * function(operands), jnp.arange(1.0, 4.0))[0]

    return run


def stacked(operands):
    return jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), operands)


TRANSFORMATIONS = {
    "grad of scan of checkpoint": lambda f: jax.grad(loss(through_a_scan(jax.checkpoint(f)))),
    "second order": lambda f: jax.grad(lambda x: squares(jax.value_and_grad(loss(f))(x))),
    "grad of vmap": lambda f: jax.grad(loss(lambda x: jax.vmap(f)(stacked(x)))),
    "vmap of vmap": lambda f: lambda x: jax.vmap(jax.vmap(f))(stacked(stacked(x))),
}


def assert_same(transform, name, operands):
    """Asserts that the kernel and XLA give the same under a transformation."""
    kernel, xla = (quick_jit(transform(operation(name, b))) for b in ("interpret", "xla"))
    for actual, expected in zip(
        jax.tree.leaves(kernel(operands)), jax.tree.leaves(xla(operands)), strict=True
    ):
        assert_close(actual, float64(expected), 1e-5)


@pytest.mark.parametrize(
    ("name", "transformation"),
    [
        *(("matmul", transformation) for transformation in TRANSFORMATIONS),
        ("conv2d", "grad of scan of checkpoint"),
        ("conv2d", "second order"),
        ("conv2d", "vmap of vmap"),
        ("transpose", "second order"),
    ],
)
def test_transformed_kernels_give_what_xlas_operations_give(name, transformation):
    assert_same(TRANSFORMATIONS[transformation], name, operands_of(name))


def test_kernels_run_without_jit():
    operands = operands_of("conv2d")
    actual, expected = (operation("conv2d", b)(operands) for b in ("interpret", "xla"))
    assert_close(actual, float64(expected), 1e-5)


ALL = ("left", "right", "bias", "residual")


@pytest.mark.parametrize(
    ("name", "moving"),
    [
        *[("matmul", m) for m in (["left"], ["right"], ["bias"], ["left", "right"], ALL)],
        *[("conv2d", m) for m in (["right"], ["bias"], ["left", "residual"])],
        ("batch last", ["left", "residual"]),
    ],
)
def test_vmap_over_some_operands(name, moving):
    operands = operands_of(name) | {k: v for k, v in operands_of(name, (3,)).items() if k in moving}
    axes = ({key: 0 if key in moving else None for key in operands},)
    assert_same(lambda f: jax.vmap(jax.value_and_grad(loss(f)), axes), name, operands)


def launches_and_loops(jaxpr):
    """The names of them in a jaxpr, without what is in a kernel."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("pallas_call", "scan", "while"):
            yield equation.primitive.name
        if equation.primitive.name != "pallas_call":
            for parameter in equation.params.values():
                inner = getattr(parameter, "jaxpr", parameter)
                if hasattr(inner, "eqns"):
                    yield from launches_and_loops(inner)


@pytest.mark.parametrize(
    ("name", "moving"),
    [
        ("matmul", ["left"]),
        ("matmul", ["left", "right", "residual"]),
        ("conv2d", ["left", "residual"]),
        ("batch last", ["left", "residual"]),
    ],
)
def test_a_batch_of_images_is_one_launch(name, moving):
    operands = operands_of(name) | {k: v for k, v in operands_of(name, (3,)).items() if k in moving}
    axes = ({key: 0 if key in moving else None for key in operands},)
    batched = jax.vmap(operation(name, "interpret"), axes)
    assert list(launches_and_loops(jax.make_jaxpr(batched)(operands))) == ["pallas_call"]


MODES = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jvp under jit": lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "hessian": lambda f, x: jax.hessian(loss(f))(x),
    "jvp of grad": lambda f, x: jax.jvp(jax.grad(loss(f)), (x,), (x,)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["matmul", "conv2d", "transpose"])
def test_forward_mode_is_refused_with_the_backend_that_has_it(name, mode):
    with pytest.raises(NotImplementedError, match="no forward-mode derivative: use backend='xla'"):
        MODES[mode](operation(name, "interpret"), operands_of(name))


@pytest.mark.parametrize(("activation", "arrays"), [(None, 0), ("relu", 1), ("gelu", 1)])
@pytest.mark.parametrize("name", ["matmul", "conv2d", "batch last", "transpose"])
def test_backward_keeps_the_operands_and_one_array_for_an_activation(name, activation, arrays):
    function, options, left, right, out = OPERATIONS[name]
    call = partial(function, backend="interpret", activation=activation, **options)
    shapes = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (left, right))
    _, pull = jax.eval_shape(partial(jax.vjp, call), *shapes)
    kept = sum(leaf.size for leaf in jax.tree.leaves(pull))
    size = np.prod(left) + np.prod(right) + arrays * np.prod(out)
    assert size <= kept <= size + 4


def test_relu_keeps_no_array_but_its_result():
    a, b = normal(0, (6, 5)), normal(1, (5, 4))
    y, pull = jax.vjp(partial(matmul, backend="interpret", activation="relu"), a, b)
    (kept,) = (leaf for leaf in jax.tree.leaves(pull) if leaf.size == y.size)
    np.testing.assert_array_equal(kept, y)


@pytest.mark.parametrize("options", [{}, BATCH_LAST], ids=["images first", "images last"])
def test_split_sums_are_the_same_every_time(options):
    images, w = normal(0, (8, 24, 24, 8)), normal(1, (1, 2, 8, 8))
    call = partial(conv2d, backend="interpret", **options)
    gradient = jax.grad(lambda w: jnp.sum(call(images, w) ** 2))
    splits = re.findall(r'"splits": (\d+)', str(jax.make_jaxpr(gradient)(w)))
    assert max(map(int, splits)) == 16
    compiled = quick_jit(gradient)
    np.testing.assert_array_equal(compiled(w), compiled(w))


def test_the_split_sum_of_a_product_is_the_same_every_time():
    a, b = normal(2, (16, 200)), normal(3, (200, 16))
    product = quick_jit(partial(matmul, backend="interpret", blocks=Blocks(16, 16, 16, splits=4)))
    np.testing.assert_array_equal(product(a, b), product(a, b))
