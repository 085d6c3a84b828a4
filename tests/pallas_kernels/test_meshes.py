"""The kernels, interpreted, on eight devices: each launches on its own shard of the arrays."""

import re
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import conv2d, conv2d_transpose, matmul
from tests.compiling import quick_jit
from tests.pallas_kernels.arrays import assert_close, float64, normal

GATHERS = ("all-gather", "all-to-all", "collective-permute")
LAST = P(None, None, None, "data")
BATCH_LAST = {"layout": "CHWN", "algorithm": "direct_chwn"}


@dataclass(frozen=True)
class Split:
    """An operation whose operands and result are split over devices."""

    operation: Any
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    """Of the two operands and the result."""
    specs: tuple[P, P, P]
    all_reduces: int
    """Of a result and its two gradients."""
    options: dict[str, Any] = field(default_factory=dict)

    def arrays(self):
        return [normal(seed, shape) for seed, shape in enumerate(self.shapes)]

    def result_and_gradients(self, left, right, cotangent, *, backend="interpret"):
        """In the order of `specs`."""
        y, pull = jax.vjp(partial(self.operation, backend=backend, **self.options), left, right)
        return *pull(cotangent), y

    def on_one_device(self):
        """XLA's."""
        options = {name: value for name, value in self.options.items() if name != "algorithm"}
        alone = partial(replace(self, options=options).result_and_gradients, backend="xla")
        return map(float64, jax.jit(alone)(*self.arrays()))


IMAGES, KERNEL, RESULT = (16, 5, 6, 16), (3, 2, 16, 24), (16, 5, 6, 24)

SPLITS = {
    "rows": Split(
        matmul, ((64, 8), (8, 16), (64, 16)), (P("data"), P(), P("data")), 1, {"activation": "gelu"}
    ),
    "tokens": Split(matmul, ((8, 3, 4), (4, 5), (8, 3, 5)), (P("data"), P(), P("data")), 1),
    "columns": Split(
        matmul, ((6, 8), (8, 16), (6, 16)), (P(), P(None, "data"), P(None, "data")), 1
    ),
    "matrices": Split(matmul, ((8, 3, 4), (8, 4, 5), (8, 3, 5)), (P("data"),) * 3, 0),
    "images": Split(
        conv2d, (IMAGES, KERNEL, RESULT), (P("data"), P(), P("data")), 1, {"activation": "relu"}
    ),
    "images last": Split(
        conv2d, ((4, 5, 6, 16), (3, 2, 4, 8), (8, 5, 6, 16)), (LAST, P(), LAST), 1, BATCH_LAST
    ),
    "output channels": Split(conv2d, (IMAGES, KERNEL, RESULT), (P(), LAST, LAST), 1),
    "groups": Split(
        conv2d,
        (IMAGES, (3, 2, 2, 24), RESULT),
        (LAST, LAST, LAST),
        0,
        {"groups": 8, "activation": "silu"},
    ),
    "images of a transpose": Split(
        conv2d_transpose, (RESULT, KERNEL, IMAGES), (P("data"), P(), P("data")), 1
    ),
}


def on(mesh, arrays, specs):
    return [
        jax.device_put(array, NamedSharding(mesh, spec))
        for array, spec in zip(arrays, specs, strict=True)
    ]


def collectives(compiled):
    """How often each collective is in a compiled program."""
    names = re.findall(r" ([a-z-]+?)(?:-start)?\(", compiled.as_text())
    return {name: names.count(name) for name in (*GATHERS, "all-reduce") if name in names}


def assert_stays_split(split, mesh):
    """Asserts that no shard of an operand goes to another device, and that results are right."""
    arrays = on(mesh, split.arrays(), split.specs)
    compiled = quick_jit(split.result_and_gradients).lower(*arrays).compile()
    assert collectives(compiled) == ({"all-reduce": split.all_reduces} if split.all_reduces else {})
    for actual, expected, spec in zip(
        compiled(*arrays), split.on_one_device(), split.specs, strict=True
    ):
        assert actual.sharding.is_equivalent_to(NamedSharding(mesh, spec), actual.ndim)
        assert_close(actual, expected, 1e-5)


def mesh_of(*sizes, axis_type=AxisType.Auto):
    return jax.make_mesh(
        sizes, ("data", "model")[: len(sizes)], axis_types=(axis_type,) * len(sizes)
    )


@pytest.mark.parametrize("name", SPLITS)
def test_what_is_split_stays_split(name):
    assert_stays_split(SPLITS[name], mesh_of(8))


@pytest.mark.parametrize("name", ["rows", "images", "groups"])
def test_axes_may_be_part_of_the_type(name):
    mesh = mesh_of(8, axis_type=AxisType.Explicit)
    assert_stays_split(SPLITS[name], mesh)
    with jax.set_mesh(mesh):
        assert_stays_split(SPLITS[name], mesh)


def test_images_and_output_channels_over_two_axes_of_a_mesh():
    image = P("data", None, None, "model")
    specs = (P("data"), P(None, None, None, "model"), image)
    split = replace(SPLITS["images"], specs=specs, all_reduces=2)
    assert_stays_split(split, mesh_of(4, 2))


# The sum over k is over devices too: each adds its own part, and an activation needs all of it.
@pytest.mark.parametrize(
    ("operation", "shapes", "specs"),
    [
        (matmul, ((6, 16), (16, 4)), (P(None, "data"), P("data"))),
        (conv2d, (IMAGES, KERNEL), (LAST, P(None, None, "data"))),
    ],
)
@pytest.mark.parametrize(
    ("activation", "expected"), [(None, {"all-reduce": 1}), ("relu", {"all-gather": 2})]
)
def test_a_sum_over_devices_is_added_up(operation, shapes, specs, activation, expected):
    arrays = [normal(seed, shape) for seed, shape in enumerate(shapes)]
    call = partial(operation, activation=activation)
    split = on(mesh_of(8), arrays, specs)
    compiled = quick_jit(partial(call, backend="interpret")).lower(*split).compile()
    assert collectives(compiled) == expected
    assert_close(compiled(*split), float64(call(*arrays, backend="xla")), 1e-5)


def test_what_is_added_to_a_sum_over_devices_is_added_once():
    """As in the second layer of a transformer's branches, whose hidden units are split."""
    arrays = [normal(seed, shape) for seed, shape in enumerate(((2, 3, 16), (16, 4)))]
    terms = {"bias": normal(2, (4,)), "residual": normal(3, (2, 3, 4))}
    split = on(mesh_of(8), arrays, (P(None, None, "data"), P("data")))
    call = partial(matmul, backend="interpret", **terms)
    compiled = quick_jit(call).lower(*split).compile()
    assert collectives(compiled) == {"all-reduce": 1}
    assert_close(compiled(*split), float64(matmul(*arrays, **terms, backend="xla")), 1e-5)


def test_images_split_across_pixels_are_gathered():
    x, w = normal(0, (2, 16, 6, 4)), normal(1, (3, 2, 4, 8))
    split = on(mesh_of(8), (x, w), (P(None, "data"), P()))
    compiled = quick_jit(partial(conv2d, backend="interpret")).lower(*split).compile()
    assert collectives(compiled) == {"all-gather": 1}
    assert_close(compiled(*split), float64(conv2d(x, w, backend="xla")), 1e-5)


@pytest.mark.parametrize("name", ["rows", "images"])
def test_shard_map(name):
    split = SPLITS[name]

    def gradients(left, right, cotangent):
        d_left, d_right, y = split.result_and_gradients(left, right, cotangent)
        return d_left, jax.lax.psum(d_right, "data"), y

    mapped = jax.shard_map(
        gradients,
        mesh=mesh_of(8),
        in_specs=split.specs,
        out_specs=split.specs,
        check_vma=False,
    )
    for actual, expected in zip(
        quick_jit(mapped)(*split.arrays()), split.on_one_device(), strict=True
    ):
        assert_close(actual, expected, 1e-5)


def mapped_gradient(backend):
    """The gradient of b, of all rows of a, in a shard_map that follows what varies."""

    def gradient(a, b):
        return jax.grad(lambda b: jnp.sum(matmul(a, b, backend=backend)))(b)

    return jax.shard_map(gradient, mesh=mesh_of(8), in_specs=(P("data"), P()), out_specs=P())


def test_a_gradient_in_a_shard_map_is_summed_over_what_varies():
    jaxpr = jax.make_jaxpr(mapped_gradient("triton"))(jnp.ones((8, 4)), jnp.ones((4, 4)))
    assert "psum" in str(jaxpr)


def test_the_interpreter_cannot_follow_what_varies():
    with pytest.raises(NotImplementedError, match="'interpret' needs check_vma=False"):
        mapped_gradient("interpret")(jnp.ones((8, 4)), jnp.ones((4, 4)))
