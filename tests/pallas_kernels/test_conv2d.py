"""conv2d against a float64 convolution written as loops, in every pass and by every algorithm."""

import inspect
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import Blocks, conv2d, conv2d_transpose
from pallas_kernels.conv2d import reference
from tests.pallas_kernels.arrays import assert_close, float64, normal
from tests.pallas_kernels.convolutions import Case, cases, convolve, forward, transposed
from tests.pallas_kernels.references import ACTIVATIONS, Epilogue, assert_agrees

ALGORITHMS = ("direct", "im2col", "shifted")

# On a CPU, XLA of jax 0.12 adds up the bfloat16 gradients of some products in bfloat16: a 1×1
# kernel's was off by 1.2e-2 where 0.10 and the kernels stay below 1e-2.
BY_XLA = {jnp.bfloat16: 4e-2}


@given(
    direction=st.sampled_from([forward, transposed]),
    case=cases(images=st.integers(0, 3), groups=st.integers(1, 3)),
    algorithm=st.sampled_from([None, *ALGORITHMS]),
    layout=st.sampled_from(["NHWC", "NCHW", "CHWN"]),
    dtype=st.sampled_from([jnp.float32, jnp.float32, jnp.bfloat16]),
)
def test_every_pass_agrees_with_loops(direction, case, algorithm, layout, dtype):
    call = direction(case, layout=layout, algorithm=algorithm)
    assert_agrees(*call, Epilogue(dtype), tolerance=BY_XLA.get(dtype))


SPECIAL = {
    "pointwise": Case((2, 5, 6, 4), (1, 1, 4, 3)),
    "pointwise strided": Case((2, 5, 6, 4), (1, 1, 2, 6), strides=(2, 3), groups=2),
    "patches": Case((2, 8, 9, 3), (4, 3, 3, 5), strides=(4, 3), padding="VALID"),
    "patches that leave a rest": Case((2, 9, 11, 4), (4, 3, 2, 6), (4, 3), "VALID", groups=2),
    "depthwise": Case((2, 7, 6, 4), (3, 3, 1, 4), strides=(2, 1), groups=4),
    "depthwise, two outputs an input": Case((2, 7, 6, 4), (3, 2, 1, 8), groups=4),
    "one input channel": Case((3, 7, 6, 1), (3, 3, 1, 5), padding=((1, 1), (1, 1))),
    "AlexNet's stem": Case((1, 31, 31, 3), (11, 11, 3, 4), (4, 4), ((0, 3), (0, 3))),
}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in SPECIAL),
        *(
            (name, options)
            for name in ("pointwise", "patches", "depthwise")
            for options in ({"dtype": jnp.bfloat16}, {"backend": "interpret"})
        ),
    ],
)
def test_special_forms_agree_with_loops(name, options):
    word = name.split()[0]
    algorithm = word if word in ("pointwise", "patches") else None
    options = {"backend": "xla", "dtype": jnp.float32} | options
    epilogue = Epilogue(options.pop("dtype"))
    tolerance = BY_XLA.get(epilogue.dtype) if options["backend"] == "xla" else None
    call = forward(SPECIAL[name], algorithm=algorithm, **options)
    assert_agrees(*call, epilogue, tolerance=tolerance)


def test_reference_agrees_with_loops():
    case = Case((2, 6, 7, 4), (3, 2, 2, 6), (2, 1), ((0, 2), (1, 0)), (1, 2), groups=2)
    x, w = normal(0, case.x_shape), normal(1, case.w_shape)
    assert_close(reference(x, w, **case.options), convolve(case, float64(x), float64(w)), 1e-5)


def test_same_padding_with_stride_two_is_not_symmetric():
    x = jnp.arange(4.0).reshape(1, 1, 4, 1)
    ones = jnp.ones((1, 3, 1, 1))
    same = conv2d(x, ones, strides=(1, 2), padding="SAME")
    torch = conv2d(x, ones, strides=(1, 2), padding=((0, 0), (1, 1)))
    assert same.ravel().tolist() == [3, 5]
    assert torch.ravel().tolist() == [1, 6]


def test_alexnet_stem_of_a_224_image_padded_by_0_and_3_is_55_wide():
    y = jax.eval_shape(
        lambda x, w: conv2d(x, w, strides=(4, 4), padding=((0, 3), (0, 3))),
        jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32),
        jax.ShapeDtypeStruct((11, 11, 3, 96), jnp.float32),
    )
    assert y.shape == (1, 55, 55, 96)


@pytest.mark.parametrize(
    ("activation", "layout"),
    [*zip(ACTIVATIONS, ["NHWC"] * 5, strict=True), ("gelu", "NCHW"), ("gelu", "CHWN")],
)
def test_epilogue_and_its_gradients(activation, layout):
    case = Case((2, 5, 4, 3), (3, 3, 3, 6))
    epilogue = Epilogue(bias_dtype=jnp.float32, residual=True, activation=activation)
    assert_agrees(*forward(case, layout=layout), epilogue)


def test_out_dtype_is_independent_of_the_operands():
    x, w = normal(0, (1, 4, 4, 2), jnp.bfloat16), normal(1, (3, 3, 2, 3), jnp.bfloat16)
    assert conv2d(x, w, out_dtype=jnp.float32).dtype == jnp.float32
    assert conv2d(x, w.astype(jnp.float32)).dtype == jnp.float32
    assert conv2d(x.astype(jnp.float32), w, out_dtype=jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize("algorithm", [None, "im2col"])
def test_forward_mode_is_the_transpose_of_reverse_mode(algorithm):
    x, w, dx, dw = (normal(i, s) for i, s in enumerate([(2, 6, 5, 4), (3, 3, 2, 6)] * 2))
    g = normal(9, (2, 3, 5, 6))

    @jax.jit
    def both_modes(x, w, dx, dw, g):
        def run(x, w):
            return conv2d(x, w, strides=(2, 1), groups=2, algorithm=algorithm, activation="silu")

        _, dy = jax.jvp(run, (x, w), (dx, dw))
        grad_x, grad_w = jax.vjp(run, x, w)[1](g)
        return jnp.vdot(g, dy), jnp.vdot(grad_x, dx) + jnp.vdot(grad_w, dw)

    forward, reverse = both_modes(x, w, dx, dw, g)
    assert float(forward) == pytest.approx(float(reverse), rel=1e-4)


@pytest.mark.parametrize("algorithm", [None, "im2col"])
def test_second_derivatives_are_the_references(algorithm):
    x, w = normal(0, (1, 3, 3, 2)), normal(1, (2, 2, 2, 1))

    def hessian(function):
        def loss(x, w):
            return jnp.sum(function(x, w, activation="silu") ** 2)

        return jax.jit(jax.hessian(loss, (0, 1)))(x, w)

    ours = hessian(lambda *xw, **options: conv2d(*xw, algorithm=algorithm, **options))
    for a, e in zip(jax.tree.leaves(ours), jax.tree.leaves(hessian(reference)), strict=True):
        assert_close(a, float64(e), 1e-4)


@pytest.mark.parametrize("algorithm", [None, "im2col"])
def test_vmap_over_kernels_and_images(algorithm):
    x, w = normal(0, (3, 2, 5, 4, 2)), normal(1, (3, 3, 3, 2, 4))

    @jax.jit
    def gradient(x, w):
        return jax.grad(lambda w: jnp.sum(conv2d(x, w, algorithm=algorithm) ** 2))(w)

    together = jax.jit(jax.vmap(gradient))(x, w)
    one_by_one = jnp.stack([gradient(*pair) for pair in zip(x, w, strict=True)])
    assert_close(together, float64(one_by_one), 1e-5)


@pytest.mark.parametrize("algorithm", [None, *ALGORITHMS])
def test_backward_keeps_the_operands_and_nothing_of_their_size_more(algorithm):
    x, w = normal(0, (4, 12, 12, 8)), normal(1, (3, 3, 8, 8))
    _, pull = jax.vjp(lambda x, w: conv2d(x, w, algorithm=algorithm), x, w)
    kept = sum(leaf.size for leaf in jax.tree.leaves(pull))
    assert x.size + w.size <= kept <= x.size + w.size + 64


def test_backward_through_a_scan_keeps_one_activation_a_layer():
    layers, x = 16, jnp.ones((8, 28, 28, 16))

    def loss(kernels, x):
        def layer(x, w):
            return conv2d(x, w, algorithm="shifted"), None

        return jnp.sum(jax.lax.scan(layer, x, kernels)[0] ** 2)

    compiled = jax.jit(jax.grad(loss)).lower(jnp.ones((layers, 3, 3, 16, 16)), x).compile()
    activations = compiled.memory_analysis().temp_size_in_bytes / x.nbytes
    # One for each layer and the nine shifts of one, not the nine shifts of each.
    assert layers <= activations < 3 * layers


@pytest.mark.parametrize(("operands", "convolutions"), [((0, 1), 3), ((1,), 2), ((0,), 2)])
def test_only_the_gradients_asked_for_are_computed(operands, convolutions):
    x, w = normal(0, (2, 6, 6, 3)), normal(1, (3, 3, 3, 4))

    def loss(x, w):
        return jnp.sum(conv2d(x, w, algorithm="direct"))

    jaxpr = str(jax.make_jaxpr(jax.grad(loss, operands))(x, w))
    assert jaxpr.count("conv_general_dilated[") == convolutions


@pytest.mark.parametrize(
    ("algorithm", "axis_type"),
    [(None, AxisType.Auto), (None, AxisType.Explicit), ("im2col", AxisType.Auto)],
)
def test_a_batch_split_over_devices_stays_split(algorithm, axis_type):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    x, w = normal(0, (32, 40, 40, 8)), normal(1, (3, 3, 8, 8))

    def loss_gradients(x, w):
        return jax.grad(lambda x, w: jnp.sum(conv2d(x, w, algorithm=algorithm) ** 2), (0, 1))(x, w)

    compiled = (
        jax.jit(loss_gradients).lower(jax.device_put(x, split), jax.device_put(w, whole)).compile()
    )
    text = compiled.as_text()
    assert not re.search(r"all-gather|all-to-all|collective-permute", text)
    outside_loops = text[text.index("\nENTRY ") :]
    assert text.count(" all-reduce(") == outside_loops.count(" all-reduce(") == 1
    grad_x, grad_w = compiled(jax.device_put(x, split), jax.device_put(w, whole))
    assert grad_x.sharding.is_equivalent_to(split, 4)
    for a, e in zip((grad_x, grad_w), jax.jit(loss_gradients)(x, w), strict=True):
        assert_close(a, float64(e), 1e-5)


def test_a_batch_split_by_shard_map_agrees():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x, w = normal(0, (32, 40, 40, 8)), normal(1, (3, 3, 8, 8))

    def gradient(x, w):
        return jax.grad(lambda w: jnp.sum(conv2d(x, w, algorithm="im2col") ** 2))(w)

    split = jax.shard_map(gradient, mesh=mesh, in_specs=(P("data"), P()), out_specs=P())
    assert_close(jax.jit(split)(x, w), float64(jax.jit(gradient)(x, w)), 1e-5)


# The tests' type checker would object first to what it can see.
unchecked = inspect.unwrap(conv2d)

KERNELS = {"backend": "interpret"}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("groups=3 must divide c_in=4", {"groups": 3}),
        ("groups=0 must divide c_in=4", {"groups": 0}),
        ("groups=4 must divide c_out=6", {"groups": 4}),
        (r"w of shape \(3, 3, 4, 6\) must have c_in / groups = 2 input", {"groups": 2}),
        (
            r"strides=\(0, 1\) must be \(down, across\), whole and each at least 1",
            {"strides": (0, 1)},
        ),
        (r"dilation=\(1, 0\) must be", {"dilation": (1, 0)}),
        (r"strides=\(2.0, 2\) must be .* whole", {"strides": (2.0, 2)}),
        (r"padding=\(1.0, 1\) must be whole pixels", {"padding": ((1.0, 1), (1, 1))}),
        (r"padding=\(-1, 0\) must not be negative", {"padding": ((-1, 0), (0, 0))}),
        ("a window that spans 9 pixels does not fit 5 pixels padded by", {"dilation": (4, 4)}),
        ("layout='NWHC' must be one of", {"layout": "NWHC"}),
        ("activation='tanh' must be None or one of 'relu'", {"activation": "tanh"}),
        (r"bias of shape \(5,\) must be \(6,\)", {"bias": jnp.ones(5)}),
        (r"residual of shape \(1, 5, 5, 6\) must have", {"residual": jnp.ones((1, 5, 5, 6))}),
        ("algorithm='winograd' must be one of None, 'direct'", {"algorithm": "winograd"}),
        (r"algorithm='pointwise' cannot do this: the kernel \(3, 3\)", {"algorithm": "pointwise"}),
        (r"'patches' cannot do this: the kernel \(3, 3\) must be as", {"algorithm": "patches"}),
        ("backend='cuda' must be one of 'auto', 'xla'", {"backend": "cuda"}),
        (r"blocks=\(16, 16\) must be None with backend='xla'", {"blocks": (16, 16)}),
        ("'implicit_gemm' cannot do this: it is a kernel", {"algorithm": "implicit_gemm"}),
        ("'direct' cannot do this: it is the XLA backend's", KERNELS | {"algorithm": "direct"}),
        ("layout='NHWC' must be 'CHWN'", KERNELS | {"algorithm": "direct_chwn"}),
        ("for groups=1 = c_in=4 only", KERNELS | {"algorithm": "shifted"}),
        (r"the kernel \(3, 3\) must be \(1, 1\)", KERNELS | {"algorithm": "pointwise"}),
    ],
)
def test_errors_name_the_value_and_the_rule(message, options):
    options = {"padding": "VALID"} | options
    with pytest.raises(ValueError, match=message):
        unchecked(jnp.ones((1, 5, 5, 4)), jnp.ones((3, 3, 4, 6)), **options)


def test_operands_must_have_four_axes():
    with pytest.raises(ValueError, match="must have four axes"):
        unchecked(jnp.ones((5, 5, 4)), jnp.ones((3, 3, 4, 6)))


@pytest.mark.parametrize("size", [{"w": (1, 1)}, {"w": (2, 2)}])
def test_algorithms_that_need_no_padding_refuse_it(size):
    algorithm = "pointwise" if size["w"] == (1, 1) else "patches"
    with pytest.raises(ValueError, match="there must be no padding"):
        conv2d(
            jnp.ones((1, 4, 4, 2)),
            jnp.ones((*size["w"], 2, 2)),
            strides=size["w"],
            padding=((1, 1), (0, 0)),
            algorithm=algorithm,
        )


@pytest.mark.parametrize(
    ("message", "w", "options"),
    [
        (
            r"size=\(7, 9\) has \(4, 5\) windows, but y of shape \(1, 5, 5, 6\) has \(5, 5\)",
            (3, 3, 4, 6),
            {"size": (7, 9), "strides": (2, 2)},
        ),
        (r"w of shape \(3, 3, 4, 5\) must have y's 6 output channels", (3, 3, 4, 5), {}),
        ("groups=4 must divide c_out=6", (3, 3, 1, 6), {"groups": 4}),
        ("the kernels have no transpose of it", (3, 3, 4, 6), KERNELS | {"algorithm": "im2col"}),
        (r"bias of shape \(6,\) must be \(4,\)", (3, 3, 4, 6), {"bias": jnp.ones(6)}),
    ],
)
def test_errors_of_the_transpose_name_the_value_and_the_rule(message, w, options):
    with pytest.raises(ValueError, match=message):
        conv2d_transpose(jnp.ones((1, 5, 5, 6)), jnp.ones(w), **options)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"strides": (2, 3), "padding": "SAME"}, (10, 12)),
        ({"strides": (2, 3), "padding": "VALID"}, (11, 12)),
        ({"strides": (2, 3), "padding": ((0, 1), (2, 1)), "dilation": (2, 1)}, (12, 9)),
        ({"strides": (2, 3), "padding": "VALID", "size": (12, 14)}, (12, 14)),
    ],
)
def test_the_size_of_a_transpose_is_the_smallest_unless_given(options, size):
    y, w = jnp.ones((1, 5, 4, 6)), jnp.ones((3, 3, 4, 6))
    x = jax.eval_shape(lambda y, w: conv2d_transpose(y, w, **options), y, w)
    assert x.shape == (1, *size, 4)


def test_a_kernel_is_not_replaced_in_silence_where_there_is_no_gpu():
    with pytest.raises(NotImplementedError, match="backend='triton' needs an NVIDIA GPU"):
        conv2d(jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 2)), backend="triton")


def test_kernels_refuse_arrays_that_32_bits_do_not_count():
    x = jax.ShapeDtypeStruct((2**11, 2**10, 2**10, 1), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((3, 3, 1, 2), jnp.bfloat16)
    call = partial(conv2d, backend="triton", algorithm="implicit_gemm")
    with pytest.raises(NotImplementedError, match=r"has 2147483648 elements.*'xla'"):
        jax.eval_shape(call, x, w)


def test_integers_are_refused():
    with pytest.raises(TypeError, match="x of dtype uint8 must be floating"):
        unchecked(jnp.ones((1, 5, 5, 4), jnp.uint8), jnp.ones((3, 3, 4, 6)))


def test_blocks_are_the_kernels_own(unchecked):
    x, w = jnp.ones((1, 4, 4, 4)), jnp.ones((3, 3, 1, 4))
    blocks = Blocks(16, 16, 16)
    with pytest.raises(ValueError, match="must be None: a depthwise convolution is no kernel's"):
        conv2d(x, w, groups=4, backend="interpret", blocks=blocks)
    with pytest.raises(ValueError, match="blocks of splits=2 must have 1"):
        conv2d(x, jnp.ones((3, 3, 4, 4)), backend="interpret", blocks=replace(blocks, splits=2))


def test_numpys_integers_are_whole_numbers(unchecked):
    x, w = jnp.ones((1, 4, 4, 4)), jnp.ones((3, 3, 2, 4))
    two = np.int64(2)
    y = conv2d(x, w, groups=two, strides=(two, two))
    np.testing.assert_array_equal(y, conv2d(x, w, groups=2, strides=(2, 2)))
