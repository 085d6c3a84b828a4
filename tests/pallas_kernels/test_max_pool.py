"""max_pool against loops in numpy: values, switches, the gradient's tie rule, sizes and errors."""

import inspect
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

from pallas_kernels import Blocks, max_pool
from pallas_kernels.max_pool import (
    default_blocks,
    max_pool_with_switches,
    max_unpool,
    reference,
    search_space,
)
from tests.compiling import quick_jit
from tests.pallas_kernels.arrays import assert_close, float64, normal
from tests.pallas_kernels.test_lowering import kernels
from tests.pallas_kernels.test_meshes import collectives, mesh_of, on

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

FEW, MANY = int(os.environ.get("CONVJAX_DRAWS", "5")), 500
OVERLAPPING = {"window": (3, 3), "strides": (2, 2), "padding": ((1, 1), (1, 0))}


def by_loops(x, g, window, strides, edges):
    """(y, dx): the largest of each window, and g sent to the first place that holds it."""
    (top, _), (left, _) = edges
    h, w = x.shape[1:3]
    padded = np.pad(x, ((0, 0), *edges, (0, 0)), constant_values=-np.inf)
    out_h = (padded.shape[1] - window[0]) // strides[0] + 1
    out_w = (padded.shape[2] - window[1]) // strides[1] + 1
    y, dx = np.zeros((x.shape[0], out_h, out_w, x.shape[3])), np.zeros_like(padded)
    for b, p, q, c in np.ndindex(*y.shape):
        row, column = p * strides[0], q * strides[1]
        seen = padded[b, row : row + window[0], column : column + window[1], c]
        i, j = np.unravel_index(np.argmax(seen), seen.shape)
        y[b, p, q, c] = seen[i, j]
        if g is not None:
            dx[b, row + i, column + j, c] += g[b, p, q, c]
    return y, dx[:, top : top + h, left : left + w]


@st.composite
def cases(draw):
    pair = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(2))  # noqa: E731
    window = pair(1, 3)
    image = tuple(draw(st.integers(k, 8)) for k in window)
    edges = tuple((draw(st.integers(0, k - 1)), draw(st.integers(0, k - 1))) for k in window)
    return (draw(st.integers(0, 2)), *image, 2), window, pair(1, 3), edges


@given(case=cases())
def test_values_and_gradients_agree_with_loops_also_where_values_are_equal(case):
    shape, window, strides, edges = case
    rng = np.random.default_rng(0)
    x = rng.integers(0, 3, shape).astype(np.float32)  # three values: ties everywhere
    expected, _ = by_loops(x, None, window, strides, edges)
    g = rng.standard_normal(expected.shape).astype(np.float32)
    _, expected_dx = by_loops(x, g, window, strides, edges)

    @jax.jit
    def run(x, g):
        y, pull = jax.vjp(lambda x: max_pool(x, window=window, strides=strides, padding=edges), x)
        return y, *pull(g)

    y, dx = run(x, g)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_allclose(dx, expected_dx, atol=1e-5)


def test_the_first_of_equal_values_gets_the_whole_gradient():
    dx = jax.grad(lambda x: jnp.sum(max_pool(x, window=(2, 2), strides=(2, 2), padding="VALID")))(
        jnp.ones((1, 2, 2, 1))
    )
    assert dx.ravel().tolist() == [1, 0, 0, 0]


def test_forward_mode_follows_the_largest():
    x = jnp.arange(16.0).reshape(1, 4, 4, 1)
    _, dy = jax.jvp(
        lambda x: max_pool(x, window=(2, 2), strides=(2, 2), padding="VALID"), (x,), (10 * x,)
    )
    assert dy.ravel().tolist() == [50, 70, 130, 150]


@pytest.mark.parametrize(
    ("extent", "padding", "out"),
    [
        (112, ((0, 1), (0, 1)), 56),  # ceil mode
        (55, ((0, 0), (0, 0)), 27),  # ceil mode and floor mode alike
        (55, "SAME", 28),
        (112, ((1, 1), (1, 1)), 56),  # ResNet
    ],
)
def test_sizes_of_3x3_windows_with_stride_2(extent, padding, out):
    y = jax.eval_shape(
        lambda x: max_pool(x, window=(3, 3), strides=(2, 2), padding=padding),
        jax.ShapeDtypeStruct((1, extent, extent, 1), jnp.float32),
    )
    assert y.shape == (1, out, out, 1)


def test_padding_is_never_the_largest():
    options = {"window": (3, 3), "strides": (2, 2), "padding": ((1, 1), (1, 1))}
    assert max_pool(jnp.full((1, 2, 2, 1), -7.0), **options).item() == -7
    assert max_pool(jnp.full((1, 2, 2, 1), -7, jnp.int8), **options).item() == -7
    assert max_pool(jnp.full((1, 2, 2, 1), 7, jnp.uint8), **options).item() == 7


@pytest.mark.parametrize("place", range(4))
def test_nan_is_the_largest(place):
    x = jnp.arange(4.0).at[place].set(jnp.nan).reshape(1, 2, 2, 1)
    assert jnp.isnan(max_pool(x, window=(2, 2), strides=(1, 1), padding="VALID").item())


@pytest.mark.parametrize(
    ("message", "options"),
    [
        (
            r"padding=\(2, 0\) leaves a window of height 2 with no pixel",
            {"padding": ((2, 0), (0, 0))},
        ),
        (
            r"padding=\(0, 3\) leaves a window of width 2 with no pixel",
            {"padding": ((0, 0), (0, 3))},
        ),
        ("spans 9 pixels does not fit 4", {"window": (9, 2)}),
        (r"strides=\(0, 1\) must be", {"strides": (0, 1)}),
        ("backend='cuda' must be one of", {"backend": "cuda"}),
    ],
)
def test_errors_name_the_value_and_the_rule(message, options):
    options = {"window": (2, 2), "strides": (1, 1), "padding": "VALID"} | options
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(max_pool)(jnp.ones((1, 4, 4, 1)), **options)


@pytest.mark.parametrize("padding", ["SAME", "VALID", ((1, 0), (0, 2))])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_values_are_those_of_the_reference(padding, dtype):
    x = jnp.asarray(np.random.default_rng(0).integers(-100, 100, (2, 7, 8, 3)), dtype)
    options = {"window": (3, 3), "strides": (2, 1), "padding": padding}
    np.testing.assert_array_equal(max_pool(x, **options), reference(x, **options))


def largest_by_loops(x, window, strides, edges):
    """(y, switches) of NHWC images with any numbers in them; NaN is the largest of all."""
    (top, _), (left, _) = edges
    h, w = x.shape[1:3]
    out_h, out_w = (
        (size + sum(edge) - taps) // stride + 1
        for size, edge, taps, stride in zip((h, w), edges, window, strides, strict=True)
    )
    y, switches = np.zeros((x.shape[0], out_h, out_w, x.shape[3])), None
    switches = np.zeros(y.shape, int)
    for b, p, q, c in np.ndindex(*y.shape):
        seen = {}
        for i, j in np.ndindex(*window):
            row, column = p * strides[0] + i - top, q * strides[1] + j - left
            if 0 <= row < h and 0 <= column < w:
                seen[i * window[1] + j] = x[b, row, column, c]
        # The first of equals: Python's max keeps it.
        best = max(seen, key=lambda tap: (np.isnan(seen[tap]), np.nan_to_num(seen[tap], nan=0)))
        y[b, p, q, c], switches[b, p, q, c] = seen[best], best
    return y, switches


def unpooled_by_loops(y, switches, shape, window, strides, edges):
    """Every number added at its switch."""
    x = np.zeros(shape)
    for b, p, q, c in np.ndindex(*y.shape):
        i, j = divmod(switches[b, p, q, c], window[1])
        place = p * strides[0] + i - edges[0][0], q * strides[1] + j - edges[1][0]
        x[b, place[0], place[1], c] += y[b, p, q, c]
    return x


def to_layout(x, layout):
    return x.transpose(["NHWC".index(axis) for axis in layout])


def from_layout(x, layout):
    return np.asarray(x.astype(jnp.float32)).transpose([layout.index(axis) for axis in "NHWC"])


def assert_all_agree(case, *, channels=2, layout="NHWC", dtype=jnp.float32, backend, blocks=None):
    """Asserts that pooling, switches, unpooling and the gradient are those of loops, exactly."""
    (*pixels, _), window, strides, edges = case
    rng = np.random.default_rng(0)
    x = rng.integers(-2, 3, (*pixels, channels)).astype(np.float32)
    for extreme in (np.nan, -np.inf, -np.inf, np.inf):
        x[rng.random(x.shape) < 0.05] = extreme
    y, switches = largest_by_loops(x, window, strides, edges)
    dy = rng.integers(-4, 5, y.shape).astype(np.float32)  # whatever the order, their sum is exact
    dx = unpooled_by_loops(dy, switches, x.shape, window, strides, edges)
    options = {"window": window, "strides": strides, "padding": edges}
    options |= {"layout": layout, "backend": backend}

    @quick_jit
    def run(x, dy):
        alone = max_pool(x, blocks=blocks, **options)
        y, switches = max_pool_with_switches(x, blocks=blocks, **options)
        _, pull = jax.vjp(partial(max_pool, blocks=blocks, **options), x)
        return (
            alone,
            y,
            switches,
            max_unpool(dy, switches, size=tuple(pixels[1:]), **options),
            *pull(dy),
        )

    found = run(*(to_layout(jnp.asarray(each, dtype), layout) for each in (x, dy)))
    assert [each.dtype for each in found] == [dtype, dtype, jnp.uint8, dtype, dtype]
    for actual, expected in zip(found, (y, y, switches, dx, dx), strict=True):
        np.testing.assert_array_equal(from_layout(actual, layout), expected)


@pytest.mark.parametrize("draws", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_drawn_problems(draws):
    # Without shrinking: what is drawn is small, and to compile it takes seconds.
    @settings(max_examples=draws, phases=[Phase.generate])
    @given(
        case=cases(),
        channels=st.sampled_from([1, 3, 4, 6, 16]),
        layout=st.sampled_from(["NHWC", "CHWN", "NCHW"]),
        dtype=st.sampled_from([jnp.float32, jnp.float16, jnp.bfloat16]),
        blocks=st.none() | st.just(Blocks(16, 64, 16, warps=1)),
    )
    def check(case, **options):
        assert_all_agree(case, backend="interpret", **options)

    check()


@pytest.mark.parametrize("layout", ["NHWC", "CHWN", "NCHW"])
def test_xla(layout):
    assert_all_agree(((2, 5, 6, 2), (3, 2), (2, 1), ((1, 2), (1, 0))), layout=layout, backend="xla")


@pytest.mark.parametrize(
    "case",
    [
        ((1, 7, 9, 2), (5, 6), (1, 3), ((4, 4), (2, 5))),  # 30 taps: a loop, in both directions
        ((1, 5, 3, 2), (1, 1), (2, 2), ((0, 0), (0, 0))),
        ((1, 4, 7, 2), (2, 2), (3, 4), ((0, 0), (0, 0))),  # pixels in no window
    ],
)
def test_named_windows(case):
    assert_all_agree(case, backend="interpret")


def test_255_taps_are_the_most_that_a_switch_can_name():
    x = jnp.zeros((1, 15, 17, 1)).at[0, 14, 16, 0].set(1)
    options = {"strides": (1, 1), "padding": "VALID", "backend": "interpret"}
    _, switches = quick_jit(partial(max_pool_with_switches, window=(15, 17), **options))(x)
    assert switches.item() == 254
    with pytest.raises(ValueError, match=r"window=\(16, 16\) must have at most 255 taps"):
        max_pool_with_switches(jnp.zeros((1, 16, 16, 1)), window=(16, 16), **options)


def test_larger_windows_are_xlas_and_have_a_gradient():
    x = jnp.zeros((1, 16, 17, 1))
    call = partial(max_pool, window=(16, 16), strides=(1, 1), padding="VALID")
    dx = jax.eval_shape(jax.grad(lambda x: jnp.sum(call(x))), x)
    assert dx.shape == x.shape
    with pytest.raises(NotImplementedError, match="has no kernel: those of at most 255"):
        call(x, backend="interpret")


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_no_images(backend):
    x = jnp.zeros((0, 5, 4, 8))
    y, pull = jax.vjp(partial(max_pool, backend=backend, **OVERLAPPING), x)
    assert (y.shape, pull(y)[0].shape) == ((0, 3, 2, 8), x.shape)


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_unpooling_is_the_adjoint_of_what_windows_see_at_their_switches(backend):
    x, y = normal(0, (2, 7, 6, 4)), normal(1, (2, 4, 3, 4))
    options = {**OVERLAPPING, "backend": backend}

    @quick_jit
    def both(x, y):
        largest, switches = max_pool_with_switches(x, **options)
        return largest, max_unpool(y, switches, size=(7, 6), **options)

    largest, unpooled = both(x, y)
    assert np.vdot(float64(largest), float64(y)) == pytest.approx(
        np.vdot(float64(x), float64(unpooled)), rel=1e-6
    )


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_the_gradient_only_selects_and_keeps_a_byte_a_window(backend):
    x = normal(0, (2, 7, 6, 4))
    call = partial(max_pool, backend=backend, **OVERLAPPING)

    def gradient(x):
        return jax.grad(lambda x: jnp.sum(call(x) ** 2))(x)

    if backend == "xla":  # the interpreter stores by scatters
        program = jax.jit(gradient).lower(x)
        assert "scatter" not in str(jax.make_jaxpr(gradient)(x))
        assert "scatter" not in program.as_text() + program.compile().as_text()
    y, pull = jax.eval_shape(partial(jax.vjp, call), x)
    kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.size > 1]
    assert [(leaf.size, leaf.dtype) for leaf in kept] == [(y.size, jnp.uint8)]


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_switches_have_a_gradient_through_the_values(backend):
    x = normal(0, (2, 5, 4, 4))

    def loss(x):
        y, switches = max_pool_with_switches(x, backend=backend, **OVERLAPPING)
        size = {"size": (5, 4), "backend": backend, **OVERLAPPING}
        return jnp.sum(max_unpool(y, switches, **size) ** 2)

    # What is unpooled is x where a switch is, as often as there are; both passes count it.
    counts = jax.grad(lambda x: jnp.sum(max_pool(x, **OVERLAPPING)))(x)
    assert_close(quick_jit(jax.grad(loss))(x), float64(2 * x * counts**2), 1e-6)


TRANSFORMATIONS = {
    "grad of vmap of checkpoint": lambda f: jax.grad(
        lambda x: jnp.sum(jax.vmap(jax.checkpoint(f))(jnp.stack([x, 2 * x])) ** 3)
    ),
    "second order": lambda f: jax.grad(
        lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(f(x) ** 3))(x) ** 2)
    ),
    "vmap of a pull": lambda f: lambda x: jax.vmap(jax.vjp(f, x)[1])(jnp.stack([f(x), 2 * f(x)])),
}


@pytest.mark.parametrize(
    ("transformation", "layout"),
    [
        ("grad of vmap of checkpoint", "NHWC"),
        ("second order", "NHWC"),
        ("vmap of a pull", "NCHW"),
    ],
)
def test_transformed_kernels_give_what_xla_gives(transformation, layout):
    x = to_layout(normal(0, (2, 5, 4, 4)), layout)
    actual, expected = (
        quick_jit(
            TRANSFORMATIONS[transformation](
                partial(max_pool, layout=layout, backend=backend, **OVERLAPPING)
            )
        )(x)
        for backend in ("interpret", "xla")
    )
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_close(a, float64(b), 1e-5)


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_a_batch_is_one_launch_without_a_copy(layout):
    x = jax.ShapeDtypeStruct((3, 2, 4, 5, 6), jnp.float32)
    call = partial(max_pool, layout=layout, backend="interpret", **OVERLAPPING)
    program = str(jax.make_jaxpr(jax.vmap(call))(x))
    assert program.count("pallas_call") == 1
    assert "transpose[" not in program


@pytest.mark.parametrize(
    "mode",
    [
        lambda f, x: jax.jvp(f, (x,), (x,)),
        lambda f, x: jax.jvp(jax.grad(lambda x: jnp.sum(f(x) ** 2)), (x,), (x,)),
    ],
)
def test_forward_mode_of_a_kernel_is_refused(mode):
    with pytest.raises(NotImplementedError, match="no forward-mode derivative: use backend='xla'"):
        mode(partial(max_pool, backend="interpret", **OVERLAPPING), normal(0, (1, 4, 4, 4)))


@pytest.mark.parametrize(
    ("shape", "spec", "axis_type"),
    [
        ((8, 5, 4, 2), P("data"), AxisType.Auto),
        ((2, 5, 4, 16), P(None, None, None, "data"), AxisType.Auto),
        ((2, 5, 4, 16), P(None, None, None, "data"), AxisType.Explicit),
    ],
)
def test_what_is_split_stays_split(shape, spec, axis_type):
    x, dy = normal(0, shape), normal(1, (shape[0], 3, 2, shape[3]))

    def run(x, dy, backend="interpret"):
        y, pull = jax.vjp(partial(max_pool, backend=backend, **OVERLAPPING), x)
        return y, *pull(dy)

    mesh = mesh_of(8, axis_type=axis_type)
    arrays = on(mesh, (x, dy), (spec, spec))
    with jax.set_mesh(mesh):
        compiled = quick_jit(run).lower(*arrays).compile()
        results = compiled(*arrays)
    assert collectives(compiled) == {}
    for actual, expected in zip(
        results, quick_jit(partial(run, backend="xla"))(x, dy), strict=True
    ):
        assert actual.sharding.is_equivalent_to(arrays[0].sharding, 4)
        assert_close(actual, float64(expected), 1e-6)


def test_images_split_across_pixels_are_gathered():
    x = normal(0, (2, 8, 4, 4))
    (split,) = on(mesh_of(8), (x,), (P(None, "data"),))
    call = partial(max_pool, backend="interpret", **OVERLAPPING)
    compiled = quick_jit(call).lower(split).compile()
    assert collectives(compiled) == {"all-gather": 1}
    np.testing.assert_array_equal(compiled(split), max_pool(x, **OVERLAPPING))


def test_shard_map():
    x = normal(0, (8, 5, 4, 2))

    def run(x, backend="interpret"):
        call = partial(max_pool, backend=backend, **OVERLAPPING)
        return jax.grad(lambda x: jnp.sum(call(x) ** 2))(x)

    options = {"mesh": mesh_of(8), "in_specs": P("data"), "out_specs": P("data")}
    mapped = quick_jit(jax.shard_map(run, check_vma=False, **options))
    assert_close(mapped(x), float64(quick_jit(partial(run, backend="xla"))(x)), 1e-6)


@pytest.mark.parametrize(
    ("shape", "options", "dtype"),
    [
        ((4, 7, 7, 96), {}, jnp.bfloat16),
        ((3, 6, 9, 20), {"strides": (1, 2)}, jnp.float16),
        ((2, 8, 8, 3), {"window": (5, 4), "strides": (1, 1), "padding": "SAME"}, jnp.float32),
        ((2, 3, 9, 9), {"layout": "NCHW"}, jnp.bfloat16),
    ],
)
def test_triton_lowers_the_kernels(shape, options, dtype):
    def run(x):
        y, pull = jax.vjp(partial(max_pool, backend="triton", **OVERLAPPING | options), x)
        return pull(y)

    assert kernels(run, shape, dtype=dtype) == ["max_pool", "max_unpool"]


@pytest.mark.parametrize(
    ("shape", "dtype", "found"),
    [
        ((2, 5, 5, 8), jnp.bfloat16, 1),
        ((2, 5, 5, 3), jnp.bfloat16, 0),
        ((2, 5, 5, 16), jnp.int8, 0),
    ],
)
def test_auto_on_a_gpu_is_the_kernel_where_loads_are_whole(shape, dtype, found):
    call = partial(max_pool, **OVERLAPPING)
    assert kernels(call, shape, dtype=dtype) == ["max_pool"] * found


def test_default_blocks_are_first_in_the_search_space():
    for shape in ((128, 27, 27, 96), (2, 3, 5, 3)):
        for dtype in (jnp.bfloat16, jnp.float32):
            found = search_space(shape, dtype)
            assert found[0] == default_blocks(shape, dtype)
            assert len(set(found)) == len(found)


def test_integers_have_switches_but_no_kernel():
    x = jnp.asarray([[3, 7], [7, 1]], jnp.int8).reshape(1, 2, 2, 1)
    options = {"window": (2, 2), "strides": (1, 1), "padding": "VALID"}
    y, switches = max_pool_with_switches(x, **options)
    assert (y.item(), switches.item()) == (7, 1)
    with pytest.raises(NotImplementedError, match="an array of int8 has no kernel"):
        max_pool(x, backend="interpret", **options)


@pytest.mark.usefixtures("unchecked")
def test_unpooling_refuses_what_no_pooling_gave():
    y, switches = jnp.ones((1, 2, 2, 4)), jnp.zeros((1, 2, 2, 4), jnp.uint8)
    options = {"window": (2, 2), "strides": (2, 2), "padding": "VALID", "size": (4, 4)}
    for error, message, arrays, changes in (
        (TypeError, "y of dtype int32 must be floating", (y.astype(jnp.int32), switches), {}),
        (TypeError, "switches of dtype int32 must be uint8", (y, switches.astype(jnp.int32)), {}),
        (ValueError, "must have y's shape", (y, switches[:, :1]), {}),
        (ValueError, r"size=\(6, 4\) have \(3, 2\) windows", (y, switches), {"size": (6, 4)}),
        (ValueError, "size=4 must be", (y, switches), {"size": 4}),
        (ValueError, "layout='HWCN' must be", (y, switches), {"layout": "HWCN"}),
    ):
        with pytest.raises(error, match=message):
            max_unpool(*arrays, **options | changes)
