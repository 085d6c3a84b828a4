"""ResNets: the papers' counts, what their blocks are, and stages under a scan."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from convjax import create_model
from convjax.layers import BatchNorm, Conv
from convjax.models.preact_resnet import PreActBottleneck
from convjax.models.resnet import BasicBlock, Bottleneck, Shortcut

PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnet18_v1": 11_689_512,
    "resnet34_v1": 21_797_672,
    "resnet50_v1": 25_557_032,
    "resnet101_v1": 44_549_160,
    "resnet152_v1": 60_192_808,
    "resnet20_cifar": 269_722,
    "resnet32_cifar": 464_154,
    "resnet44_cifar": 658_586,
    "resnet56_cifar": 853_018,
    "resnet110_cifar": 1_727_962,
    "resnet1202_cifar": 19_421_274,
    "plain20_cifar": 269_722,
    "plain32_cifar": 464_154,
    "plain44_cifar": 658_586,
    "plain56_cifar": 853_018,
    "plain110_cifar": 1_727_962,
    "preact_resnet164_cifar": 1_703_258,
    "preact_resnet1001_cifar": 10_327_706,
}


def shapes(model, size=32, channels=3):
    images = jax.ShapeDtypeStruct((1, size, size, channels), jnp.float32)
    return jax.eval_shape(model.init, jax.random.key(0), images)


def count(variables):
    return sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_parameters_of_the_papers(name, parameters):
    assert count(shapes(create_model(name))) == parameters


@pytest.mark.parametrize("shortcut", ["pad", "none"])
def test_option_a_has_the_parameters_of_the_plain_network(shortcut):
    assert count(shapes(create_model("resnet34", shortcut=shortcut))) == 21_623_848


def test_sizes_of_table_1():
    model = create_model("resnet50")
    _, taps = jax.eval_shape(
        lambda v, x: model.apply(v, x, capture_intermediates=True, mutable=["intermediates"]),
        shapes(model),
        jax.ShapeDtypeStruct((2, 224, 224, 3), jnp.float32),
    )
    taps = taps["intermediates"]
    outputs = {name: taps[name]["__call__"][0].shape for name in taps if name != "__call__"}
    assert outputs["conv1"] == (2, 112, 112, 64)
    assert outputs["conv2_1"] == (2, 56, 56, 256)
    assert outputs["conv3_1"] == (2, 28, 28, 512)
    assert outputs["conv4_x"] == (5, 2, 14, 14, 1024)  # the five equal blocks, stacked
    assert outputs["conv5_x"] == (2, 2, 7, 7, 2048)
    assert outputs["fc"] == (2, 1000)


@pytest.mark.parametrize(("name", "size"), [("resnet50_v1", 28), ("resnet50", 56)])
def test_which_convolution_halves_the_image(name, size):
    model = create_model(name)
    _, taps = jax.eval_shape(
        lambda v, x: model.apply(v, x, capture_intermediates=True, mutable=["intermediates"]),
        shapes(model),
        jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32),
    )
    inside = taps["intermediates"]["conv3_1"]
    assert inside["conv1"]["__call__"][0].shape == (1, size, size, 128)
    assert inside["conv2"]["__call__"][0].shape == (1, 28, 28, 128)


BLOCKS = {"basic": BasicBlock, "bottleneck": Bottleneck, "preact": PreActBottleneck}


def small(kind, **fields):
    """Two stages of three and two blocks, narrow."""
    if kind == "preact":
        name = "preact_resnet164_cifar"
    else:
        name, fields = "resnet20_cifar", {"block": kind, "shortcut": "projection"} | fields
    return create_model(name, num_classes=5, stage_sizes=(3, 2), widths=(4, 8), **fields)


def random_variables(model, images):
    """Variables as after some training: no scale, bias or statistic at its initial value."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        values = rng.normal(size=leaf.shape).astype(np.float32)
        if path[-1].key == "kernel":
            return jnp.asarray(values / np.sqrt(np.prod(leaf.shape[-4:-1])))
        return jnp.asarray(1 + 0.3 * np.abs(values))

    return jax.tree.map_with_path(draw, shapes(model, *images.shape[-2:]))


def initial(model, images):
    return jax.jit(model.init)(jax.random.key(0), images)


def forward(model, variables, images):
    """Logits and every module's output, by name."""

    @jax.jit
    def apply(variables, images):
        return model.apply(variables, images, capture_intermediates=True, mutable=["intermediates"])

    logits, taps = apply(variables, images)
    return logits, taps["intermediates"]


@pytest.fixture
def images():
    return jax.random.normal(jax.random.key(2), (4, 8, 8, 3))


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_scanned_stage_is_its_blocks_one_after_another(kind, images):
    model = small(kind)
    variables = random_variables(model, images)
    _, taps = forward(model, variables, images)
    block = BLOCKS[kind](
        4, 1, "projection", conv=partial(Conv, use_bias=False), norm=partial(BatchNorm)
    )
    x = taps["conv2_1"]["__call__"][0]
    for i, stacked in enumerate(taps["conv2_x"]["__call__"][0]):
        own = {
            c: jax.tree.map(lambda leaf, i=i: leaf[i], v["conv2_x"]) for c, v in variables.items()
        }
        x = block.apply(own, x, train=False)
        np.testing.assert_allclose(x, stacked, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_of_a_stage_start_from_different_kernels(kind, images):
    params = initial(small(kind), images)["params"]
    kernels = params["conv2_x"]["conv1"]["kernel"]
    assert kernels.shape[0] == 2
    assert jnp.abs(kernels[0] - kernels[1]).min() > 0


@pytest.mark.parametrize("kind", ["basic", "bottleneck"])
def test_zero_initialised_blocks_are_their_shortcut(kind, images):
    """F = 0, so that a block whose shape does not change is relu(x) = x, to the bit."""
    model = small(kind, zero_init_residual=True)
    _, taps = forward(model, initial(model, images), images)
    x = taps["conv2_1"]["__call__"][0]
    for y in taps["conv2_x"]["__call__"][0]:
        np.testing.assert_array_equal(y, x)


def test_zero_initialised_preactivation_blocks_are_the_identity(images):
    model = small("preact", zero_init_residual=True)
    _, taps = forward(model, initial(model, images), images)
    for y in taps["conv2_x"]["__call__"][0]:
        np.testing.assert_array_equal(y, taps["conv2_1"]["__call__"][0])


def test_plain_networks_have_no_shortcut(images):
    """With F = 0 a plain network forgets its input, a residual one does not."""
    outputs = {}
    for shortcut in ("none", "pad"):
        model = small("basic", shortcut=shortcut, zero_init_residual=True)
        outputs[shortcut], _ = forward(model, initial(model, images), images)
    assert jnp.ptp(outputs["none"], axis=0).max() == 0
    assert jnp.ptp(outputs["pad"], axis=0).min() > 0


def test_option_a_samples_and_appends_zeros():
    x = jax.random.normal(jax.random.key(0), (1, 4, 4, 3))
    shortcut = Shortcut("pad", features=5, strides=2, conv=Conv, norm=BatchNorm)
    y = shortcut.apply({}, x, train=False)
    np.testing.assert_array_equal(y[..., :3], x[:, ::2, ::2])
    np.testing.assert_array_equal(y[..., 3:], jnp.zeros((1, 2, 2, 2)))


@pytest.mark.parametrize("kind", BLOCKS)
def test_every_parameter_gets_a_gradient(kind, images):
    model = small(kind)
    variables = random_variables(model, images)

    def loss(params):
        logits, _ = model.apply(
            {**variables, "params": params}, images, train=True, mutable=["batch_stats"]
        )
        return jnp.sum(jnp.sin(logits))

    for path, leaf in jax.tree.leaves_with_path(jax.jit(jax.grad(loss))(variables["params"])):
        assert jnp.all(jnp.isfinite(leaf)), path
        assert jnp.linalg.norm(leaf) > 0, path


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("size", [1, 7, 33])
def test_any_channels_and_sizes(channels, size):
    model = create_model("resnet8_cifar", num_classes=3)
    images = jnp.ones((2, size, size, channels))
    variables = shapes(model, size, channels)
    assert jax.eval_shape(model.apply, variables, images).shape == (2, 3)


def test_no_classes_give_features():
    model = create_model("resnet50", num_classes=0)
    variables = shapes(model)
    assert "fc" not in variables["params"]
    images = jax.ShapeDtypeStruct((2, 64, 64, 3), jnp.float32)
    assert jax.eval_shape(model.apply, variables, images).shape == (2, 2048)


def test_bfloat16_computes_in_bfloat16_with_float32_parameters(images):
    model, reference = small("basic", dtype=jnp.bfloat16), small("basic")
    variables = random_variables(reference, images)
    assert shapes(model, 8) == shapes(reference, 8)
    (logits, _), (want, _) = (forward(m, variables, images) for m in (model, reference))
    assert logits.dtype == jnp.bfloat16
    assert jnp.linalg.norm(logits - want) <= 3e-2 * jnp.linalg.norm(want)


def test_a_thousand_layers_are_no_larger_a_program_than_a_hundred():
    def equations(name):
        model = create_model(name)
        images = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
        gradient = jax.grad(lambda v, x: model.apply(v, x).sum())
        return len(str(jax.make_jaxpr(gradient)(shapes(model), images)).splitlines())

    assert equations("resnet1202_cifar") <= 1.05 * equations("resnet110_cifar")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("message", "name", "fields"),
    [
        (
            r"stage_sizes=\(2, 2\) and widths=\(4,\) must be equally long",
            "resnet18",
            {"stage_sizes": (2, 2), "widths": (4,)},
        ),
        (
            r"stage_sizes=\(0,\) .* each at least 1",
            "resnet18",
            {"stage_sizes": (0,), "widths": (4,)},
        ),
        (
            "block='bottelneck' must be one of 'basic', 'bottleneck'",
            "resnet18",
            {"block": "bottelneck"},
        ),
        ("shortcut='projction' must be one of", "resnet18", {"shortcut": "projction"}),
        (
            "shortcut='projction' must be one of",
            "preact_resnet164_cifar",
            {"shortcut": "projction"},
        ),
        ("stem='cifr' must be one of 'imagenet', 'cifar'", "resnet18", {"stem": "cifr"}),
        ("strided_layer='1X1' must be one of", "resnet50", {"strided_layer": "1X1"}),
        (r"strides=\(0, 0\) must be", "resnet8_cifar", {"stem_strides": 0}),
    ],
)
def test_fields_that_make_no_network(message, name, fields):
    with pytest.raises(ValueError, match=message):
        shapes(create_model(name, **fields))


def test_another_norm_can_be_put_in_place(images):
    class GroupNorm(nn.Module):
        dtype: Any
        scale_init: Any = nn.initializers.ones

        @nn.compact
        def __call__(self, x, train):
            return nn.GroupNorm(2, dtype=self.dtype, scale_init=self.scale_init)(x)

    model = small("basic", norm=GroupNorm)
    variables = random_variables(model, images)
    assert "batch_stats" not in variables
    assert forward(model, variables, images)[0].shape == (4, 5)
