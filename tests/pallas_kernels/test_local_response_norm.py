"""local_response_norm against float64 numpy: conventions, layouts, groups and windows' edges."""

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import Blocks
from pallas_kernels.local_response_norm import (
    default_blocks,
    local_response_norm,
    reference,
    search_space,
)
from tests.compiling import quick_jit
from tests.pallas_kernels.arrays import assert_close, distance, float64, normal
from tests.pallas_kernels.references import TOLERANCE
from tests.pallas_kernels.test_lowering import kernels
from tests.pallas_kernels.test_meshes import collectives, mesh_of, on

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

FEW, MANY = int(os.environ.get("CONVJAX_DRAWS", "5")), 500
BACKENDS = ["xla", "interpret"]
STRONG = {"alpha": 0.3, "k": 1.5}
"""Numbers under which the window matters."""


def to_layout(x, layout):
    return x.transpose(["NHWC".index(axis) for axis in layout])


def from_layout(x, layout):
    return x.transpose([layout.index(axis) for axis in "NHWC"])


def by_matrices(x, dy, *, size, alpha, beta, k, groups):
    """(y, dx) of NHWC arrays, where which channels see which is a matrix."""
    channels = x.shape[-1] // groups
    x_grouped, dy_grouped = (each.reshape(*x.shape[:3], groups, channels) for each in (x, dy))
    other, centre = np.arange(channels)[:, None], np.arange(channels)[None, :]
    seen = (other >= centre - size // 2) & (other <= centre + (size - 1) // 2)
    s = k + alpha * (x_grouped**2 @ seen)
    shared = (dy_grouped * x_grouped * s ** (-beta - 1)) @ seen.T
    dx = dy_grouped * s**-beta - 2 * alpha * beta * x_grouped * shared
    return (x_grouped * s**-beta).reshape(x.shape), dx.reshape(x.shape)


def assert_agrees(shape, *, layout="NHWC", dtype=jnp.float32, backend, groups=1, **options):
    """Asserts that y and dx are those of numpy, for x of NHWC `shape`."""
    numbers = {"size": 5, "alpha": 0.3, "beta": 0.75, "k": 1.5}
    numbers |= {name: value for name, value in options.items() if name in numbers}
    x, dy = (to_layout(normal(seed, shape, dtype), layout) for seed in range(2))
    call = partial(
        local_response_norm, layout=layout, backend=backend, groups=groups, **numbers | options
    )

    @quick_jit
    def run(x, dy):
        y, pull = jax.vjp(call, x)
        return y, *pull(dy)

    exact = (from_layout(float64(each), layout) for each in (x, dy))
    expected = by_matrices(*exact, groups=groups, **numbers)
    for actual, each in zip(run(x, dy), expected, strict=True):
        assert actual.dtype == dtype
        assert_close(from_layout(actual, layout), each, TOLERANCE[jnp.dtype(dtype).name])


# The values of FACTS: the paper, cuda-convnet's source, and Caffe's defaults.
@pytest.mark.parametrize("backend", BACKENDS)
def test_conventions(backend):
    def centre(x, convention):
        return local_response_norm(x, convention=convention, backend=backend)[0, 0, 0, 2]

    @quick_jit
    def centres(x):
        return [centre(x, convention) for convention in ("paper", "archive", "caffe")]

    assert centres(jnp.full((1, 1, 1, 5), 100.0)) == pytest.approx([23.24, 43.87, 59.46], abs=0.005)


def test_k_is_the_conventions_unless_given():
    x = normal(0, (1, 2, 2, 8))
    default, given_, caffe = (
        quick_jit(partial(local_response_norm, **options))(x)
        for options in ({}, {"k": 1.0}, {"convention": "caffe", "alpha": 5e-4})
    )
    np.testing.assert_allclose(given_, caffe, rtol=1e-6)
    assert not np.allclose(default, given_)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_of_even_size_has_one_channel_more_before_its_centre(backend):
    x = jnp.zeros((1, 1, 1, 6)).at[0, 0, 0, 2].set(1.0)
    options = {"size": 2, "alpha": 1.0, "beta": 1.0, "k": 1.0, "backend": backend}
    y = quick_jit(partial(local_response_norm, **options))(x + 1e-3).ravel()
    np.testing.assert_allclose(y / (x.ravel() + 1e-3), [1, 1, 0.5, 0.5, 1, 1], atol=2e-3)


def test_the_reference_is_the_equation():
    x = normal(0, (2, 3, 2, 12))
    numbers = {"size": 4, "alpha": 0.3, "beta": 0.6, "k": 1.5, "groups": 3}
    expected, _ = by_matrices(float64(x), float64(x), **numbers)
    assert_close(reference(x, **numbers), expected, 1e-5)


@pytest.mark.parametrize("draws", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_drawn_problems(draws):
    # Without shrinking: what is drawn is small, and to compile it takes seconds.
    @settings(max_examples=draws, phases=[Phase.generate])
    @given(
        pixels=st.tuples(*[st.integers(1, 5)] * 3),
        groups=st.integers(1, 3),
        channels=st.integers(1, 12),
        size=st.integers(1, 6),
        beta=st.sampled_from([0.75, 0.5]),
        layout=st.sampled_from(["NHWC", "CHWN", "NCHW"]),
        dtype=st.sampled_from([jnp.float32, jnp.float16, jnp.bfloat16]),
        blocks=st.none() | st.builds(Blocks, st.just(16), st.just(64), st.sampled_from([16, 32])),
    )
    def check(pixels, groups, channels, layout, dtype, blocks, **numbers):
        options = {"layout": layout, "dtype": dtype, "groups": groups, **numbers}
        shape = (*pixels, groups * channels)
        assert_agrees(shape, backend="interpret", blocks=blocks, **options)

    check()


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("NHWC", jnp.float32), ("CHWN", jnp.bfloat16), ("NCHW", jnp.float16)],
)
def test_xla(layout, dtype):
    assert_agrees(
        (2, 3, 2, 21), size=4, groups=3, beta=0.6, layout=layout, dtype=dtype, backend="xla"
    )


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 1, 1, 1), {"size": 1}),
        ((1, 3, 1, 23), {"size": 9}),  # a prime, and a window of several chunks
        ((2, 5, 3, 96), {"groups": 2, "dtype": jnp.bfloat16}),
        # More channels than a block walks, and more images than a block has
        ((33, 1, 1, 72), {"layout": "CHWN", "blocks": Blocks(16, 16, 16)}),
    ],
)
def test_named_shapes(shape, options):
    assert_agrees(shape, backend="interpret", **options)


@pytest.mark.parametrize(("backend", "layout"), [("xla", "NHWC"), ("interpret", "NCHW")])
def test_no_pixels(backend, layout):
    x = to_layout(jnp.zeros((0, 3, 3, 8)), layout)
    y, pull = jax.vjp(partial(local_response_norm, layout=layout, backend=backend), x)
    assert y.shape == x.shape == pull(y)[0].shape


@pytest.mark.parametrize(
    ("backend", "layout"), [("xla", "NHWC"), ("interpret", "NHWC"), ("interpret", "CHWN")]
)
def test_nan_stays_in_the_windows_of_its_group_and_infinity_makes_zeros(backend, layout):
    call = quick_jit(partial(local_response_norm, groups=2, layout=layout, backend=backend))
    ones = jnp.ones((1, 1, 1, 16))
    y = call(to_layout(ones.at[..., 6].set(jnp.nan), layout)).ravel()
    assert np.isnan(y).nonzero()[0].tolist() == [4, 5, 6, 7]
    y = call(to_layout(ones.at[..., 6].set(jnp.inf), layout)).ravel()
    assert (y == 0).nonzero()[0].tolist() == [4, 5, 7]
    assert np.isnan(y).nonzero()[0].tolist() == [6]


def test_float64_is_computed_in_float64():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 2, 9)))
        numbers = {"size": 5, "alpha": 0.3, "beta": 0.75, "k": 1.5}
        y, pull = jax.vjp(partial(local_response_norm, **numbers), x)
        expected = by_matrices(np.asarray(x), np.asarray(x), groups=1, **numbers)
        np.testing.assert_allclose(y, expected[0], rtol=1e-13)
        np.testing.assert_allclose(pull(x)[0], expected[1], rtol=1e-12)


def test_forward_mode_of_xla_is_the_adjoint_of_its_reverse_mode():
    x, dx, dy = (normal(seed, (2, 3, 2, 12)) for seed in range(3))
    call = partial(local_response_norm, size=4, groups=2, backend="xla", **STRONG)
    _, forward = jax.jvp(call, (x,), (dx,))
    _, pull = jax.vjp(call, x)
    assert float(jnp.vdot(forward, dy)) == pytest.approx(float(jnp.vdot(dx, pull(dy)[0])), rel=1e-4)


MODES = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jvp of grad": lambda f, x: jax.jvp(jax.grad(lambda x: jnp.sum(f(x) ** 2)), (x,), (x,)),
}


@pytest.mark.parametrize("mode", MODES)
def test_forward_mode_of_a_kernel_is_refused(mode):
    with pytest.raises(NotImplementedError, match="no forward-mode derivative: use backend='xla'"):
        MODES[mode](partial(local_response_norm, backend="interpret"), normal(0, (1, 1, 2, 4)))


TRANSFORMATIONS = {
    "grad of vmap of checkpoint": lambda f: jax.grad(
        lambda x: jnp.sum(jax.vmap(jax.checkpoint(f))(jnp.stack([x, 2 * x])) ** 3)
    ),
    "second order": lambda f: jax.grad(
        lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(f(x) ** 3))(x) ** 2)
    ),
    "vmap of a pull": lambda f: lambda x: jax.vmap(jax.vjp(f, x)[1])(jnp.stack([x, 2 * x])),
}


@pytest.mark.parametrize(
    ("transformation", "layout"),
    [
        ("grad of vmap of checkpoint", "NHWC"),
        ("second order", "CHWN"),
        ("vmap of a pull", "CHWN"),
    ],
)
def test_transformed_kernels_give_what_xla_gives(transformation, layout):
    x = to_layout(normal(0, (2, 3, 2, 6)), layout)
    actual, expected = (
        quick_jit(
            TRANSFORMATIONS[transformation](
                partial(local_response_norm, layout=layout, groups=2, backend=backend, **STRONG)
            )
        )(x)
        for backend in ("interpret", "xla")
    )
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_close(a, float64(b), 1e-5)


@pytest.mark.parametrize("layout", ["NHWC", "CHWN", "NCHW"])
def test_a_batch_is_one_launch_without_a_copy(layout):
    x = jax.ShapeDtypeStruct((3, 2, 4, 5, 6), jnp.float32)
    call = partial(local_response_norm, layout=layout, backend="interpret")
    program = str(jax.make_jaxpr(jax.vmap(call))(x))
    assert program.count("pallas_call") == 1
    assert "transpose[" not in program


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_x_is_kept(backend):
    x = normal(0, (2, 3, 2, 8), jnp.bfloat16)
    _, pull = jax.vjp(partial(local_response_norm, backend=backend), x)
    kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.size >= x.size]
    assert sum(leaf.nbytes for leaf in kept) <= 2 * x.nbytes


SPLITS = {
    "images": ((16, 2, 3, 4), P("data"), {}),
    "groups": ((2, 2, 3, 16), P(None, None, None, "data"), {"groups": 8}),
    "images last": ((4, 2, 3, 8), P(None, None, None, "data"), {"layout": "CHWN"}),
}


@pytest.mark.parametrize("name", SPLITS)
def test_what_is_split_stays_split(name):
    assert_stays_split(name, AxisType.Auto)


def test_explicit_axes():
    assert_stays_split("groups", AxisType.Explicit)


def assert_stays_split(name, axis_type):
    shape, spec, options = SPLITS[name]
    x, dy = normal(0, shape), normal(1, shape)

    def run(x, dy, backend="interpret"):
        y, pull = jax.vjp(partial(local_response_norm, backend=backend, **STRONG, **options), x)
        return y, *pull(dy)

    mesh = mesh_of(8, axis_type=axis_type)
    arrays = on(mesh, (x, dy), (spec, spec))
    with jax.set_mesh(mesh):
        compiled = quick_jit(run).lower(*arrays).compile()
        results = compiled(*arrays)
    assert collectives(compiled) == {}
    for actual, expected in zip(results, jax.jit(partial(run, backend="xla"))(x, dy), strict=True):
        assert actual.sharding.is_equivalent_to(arrays[0].sharding, 4)
        assert_close(actual, float64(expected), 1e-5)


def test_channels_of_a_group_are_gathered():
    x = normal(0, (2, 2, 3, 16))
    (split,) = on(mesh_of(8), (x,), (P(None, None, None, "data"),))
    compiled = quick_jit(partial(local_response_norm, backend="interpret")).lower(split).compile()
    assert collectives(compiled) == {"all-gather": 1}
    assert_close(compiled(split), float64(local_response_norm(x)), 1e-5)


def test_shard_map():
    x = normal(0, (8, 2, 3, 4))

    def run(x):
        return jax.grad(lambda x: jnp.sum(local_response_norm(x, backend="interpret") ** 2))(x)

    options = {"mesh": mesh_of(8), "in_specs": P("data"), "out_specs": P("data")}
    mapped = quick_jit(jax.shard_map(run, check_vma=False, **options))
    assert_close(mapped(x), float64(quick_jit(run)(x)), 1e-6)


@pytest.mark.parametrize(
    ("shape", "options", "dtype"),
    [
        ((4, 7, 7, 96), {"groups": 2}, jnp.bfloat16),
        ((3, 5, 7, 20), {"groups": 2, "size": 4, "beta": 0.5}, jnp.float16),
        ((96, 7, 7, 128), {"layout": "CHWN", "groups": 2}, jnp.float32),
        ((2, 20, 5, 7), {"layout": "NCHW", "size": 9}, jnp.bfloat16),
    ],
)
def test_triton_lowers_the_kernels(shape, options, dtype):
    def run(x, dy):
        y, pull = jax.vjp(partial(local_response_norm, backend="triton", **options), x)
        return y, *pull(dy)

    names = ["local_response_norm", "local_response_norm_gradient"]
    assert kernels(run, shape, shape, dtype=dtype) == names


@pytest.mark.parametrize(
    ("shape", "options", "found"),
    [
        ((2, 3, 3, 96), {"groups": 2}, 1),
        ((2, 3, 3, 9), {}, 0),
        ((9, 3, 3, 64), {"layout": "CHWN"}, 1),
        ((2, 64, 3, 3), {"layout": "NCHW"}, 0),
        ((2, 3, 3, 96), {"size": 64}, 0),
    ],
)
def test_auto_on_a_gpu_is_the_kernel_where_loads_are_whole(shape, options, found):
    call = partial(local_response_norm, **options)
    assert kernels(call, shape) == ["local_response_norm"] * found


def test_auto_off_a_gpu_is_xla():
    assert "pallas_call" not in str(jax.make_jaxpr(local_response_norm)(jnp.ones((1, 2, 2, 8))))


def test_default_blocks_are_first_in_the_search_space():
    for shape in ((128 * 55 * 55, 96, 1), (1, 96, 55 * 55 * 128), (2, 3, 5)):
        for dtype in (jnp.bfloat16, jnp.float32):
            found = search_space(shape, dtype)
            assert found[0] == default_blocks(shape, dtype)
            assert len(set(found)) == len(found)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, r"groups=3 must divide c=8", {"groups": 3}),
        (ValueError, r"groups=0 must be a whole number from 1 on", {"groups": 0}),
        (ValueError, r"size=2.5 must be a whole number from 1 on", {"size": 2.5}),
        (ValueError, r"convention='torch' must be one of", {"convention": "torch"}),
        (ValueError, r"layout='HWCN' must be one of NHWC", {"layout": "HWCN"}),
        (ValueError, r"k=0, alpha=0.0001 and beta=0.75 must be finite, k > 0", {"k": 0}),
        (ValueError, r"alpha=-1 and", {"alpha": -1}),
        (ValueError, r"backend='cuda' must be one of", {"backend": "cuda"}),
        (NotImplementedError, "size=33 has no kernel", {"size": 33, "backend": "interpret"}),
    ],
)
def test_errors_name_the_value_and_the_rule(error, message, options):
    with pytest.raises(error, match=message):
        local_response_norm(jnp.ones((1, 2, 2, 8)), **options)


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_image_of_floats_is_refused():
    with pytest.raises(TypeError, match="x of dtype int32 must be floating"):
        local_response_norm(jnp.ones((1, 2, 2, 8), jnp.int32))
    with pytest.raises(ValueError, match="must have four axes"):
        local_response_norm(jnp.ones((2, 2, 8)))


def test_a_large_window_is_xlas():
    x = normal(0, (1, 2, 2, 50))
    y = quick_jit(partial(local_response_norm, size=40, **STRONG))(x)
    expected = quick_jit(partial(reference, size=40, beta=0.75, **STRONG))(x)
    assert distance(y, float64(expected)) < 1e-6
