"""What every network here promises, on a narrow one of each family."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from convjax.models import replace_head
from tests.compiling import quick_jit
from tests.convjax.models.families import NARROW, SMALLEST, narrow

KEY = jax.random.key(0)
# GoogLeNet compiles for seconds: of its forms, the paper's is tested each time.
_OTHER_FORMS = ("googlenet_bn", "googlenet_torchvision")
families = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in _OTHER_FORMS else name
        for name in NARROW
    ],
)


def shape(size, channels=3, batch=2):
    return jax.ShapeDtypeStruct((batch, size, size, channels), jnp.float32)


def logits_shape(model, images):
    return jax.eval_shape(model.apply, model.shapes(images), images).shape


@families
def test_the_smallest_image_and_the_one_before_it(name):
    model, smallest = narrow(name), SMALLEST[name]
    assert logits_shape(model, shape(smallest)) == (2, 3)
    if smallest > 1:
        with pytest.raises(ValueError, match=f"at least {smallest}"):
            model.init(KEY, shape(smallest - 1))


@families
@pytest.mark.parametrize("channels", [1, 4])
def test_channels_and_another_size(name, channels):
    larger = {"vit_ti16": 48, "vit_s32": 96, "vit_b16": 80}.get(name, SMALLEST[name] + 37)
    assert logits_shape(narrow(name), shape(larger, channels)) == (2, 3)


@families
def test_no_classes_give_features_and_a_head_can_be_replaced(name):
    images = shape(SMALLEST[name] + 32)
    model, features, other = narrow(name), narrow(name, num_classes=0), narrow(name, num_classes=5)
    variables = model.init(KEY, images)
    without = features.shapes(images)
    assert model.head not in without["params"]
    (_, width) = logits_shape(features, images)
    assert variables["params"][model.head]["kernel"].shape == (width, 3)
    replaced = replace_head(other, variables, jax.random.key(1), images)
    assert jax.tree.map(jnp.shape, replaced) == jax.tree.map(jnp.shape, other.shapes(images))
    for part, leaves in replaced["params"].items():
        if part not in (model.head, *model.training_only):
            jax.tree.map(np.testing.assert_array_equal, leaves, variables["params"][part])


@families
def test_parameters_are_the_same_inside_jit_and_float32_whatever_the_dtype(name):
    images = shape(SMALLEST[name])
    model = narrow(name)
    variables = model.init(KEY, images)
    assert model.shapes(images) == jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), variables
    )
    assert narrow(name, dtype=jnp.bfloat16).shapes(images) == model.shapes(images)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
    inside = jax.jit(model.init)(KEY, jnp.zeros(images.shape))
    jax.tree.map(np.testing.assert_array_equal, inside, variables)
    assert jax.eval_shape(narrow(name, dtype=jnp.bfloat16).apply, variables, images).dtype == (
        jnp.bfloat16
    )


# Residual networks have tests of their own; the others take long to compile.
@pytest.mark.parametrize(
    "name",
    [
        *("alexnet", "vit_b16"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("alexnet_one_tower", "alexnet_owt", "zfnet", "vgg11_bn", "vit_ti16")
        ),
        *(
            pytest.param(f"googlenet{form}", marks=pytest.mark.slow)
            for form in ("", "_torchvision")
        ),
    ],
)
def test_a_step_lowers_the_loss_and_reaches_every_parameter(name):
    model, size = narrow(name), SMALLEST[name] * (2 if name.startswith("vit") else 1)
    images = jax.random.normal(jax.random.key(1), (6, size, size, 3))
    labels = jnp.asarray([0, 1, 2, 0, 1, 2])
    variables = model.init(KEY, images)

    def loss(params):
        logits, sown = model.apply(
            {**variables, "params": params},
            images,
            train=True,
            mutable=["batch_stats", "auxiliary_logits"],
            rngs={"dropout": jax.random.key(2)},
        )
        heads = [logits, *jax.tree.leaves(sown.get("auxiliary_logits", {}))]
        losses = optax.softmax_cross_entropy_with_integer_labels
        return sum(losses(head, labels).mean() for head in heads)

    # Not quite as it starts: a head of zeros, as ViT's, passes no gradient on.
    params = jax.tree.map(
        lambda leaf: leaf + 0.05 * jnp.cos(jnp.arange(1.0, leaf.size + 1)).reshape(leaf.shape),
        variables["params"],
    )
    step = quick_jit(jax.value_and_grad(loss))
    before, gradients = step(params)
    dead = [
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree.leaves_with_path(gradients)
        if not (jnp.all(jnp.isfinite(leaf)) and jnp.any(leaf))
    ]
    # What all keys share does not change their softmax.
    assert [path for path in dead if "key" not in path or "bias" not in path] == []
    square = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradients))
    after, _ = step(jax.tree.map(lambda p, g: p - 0.01 * before / square * g, params, gradients))
    assert after < before


@pytest.mark.parametrize("name", ["alexnet", "vgg11", "googlenet", "vit_b16"])
def test_training_without_a_key_says_how_to_give_one(name):
    fields = {"dropout": 0.1} if name.startswith("vit") else {}
    model, images = narrow(name, **fields), jnp.zeros(shape(SMALLEST[name]).shape)
    with pytest.raises(ValueError, match=r"dropout.* needs a key .*rngs=\{'dropout': key\}"):
        jax.eval_shape(
            lambda v: model.apply(v, images, train=True, mutable=["batch_stats"]),
            model.shapes(images),
        )


@pytest.mark.slow
@families
def test_interpreted_kernels_give_what_xla_gives(name):
    size = SMALLEST[name] * (2 if name.startswith("vit") else 1) + 8 * (SMALLEST[name] == 1)
    images = jax.random.normal(jax.random.key(1), (1, size, size, 3))
    variables = narrow(name).init(KEY, images)
    head = variables["params"][narrow(name).head]
    head["kernel"] = jax.random.normal(KEY, head["kernel"].shape)
    # "highest", for the kernels would multiply float32 in tf32.
    with jax.default_matmul_precision("highest"):
        interpreted, xla = (
            quick_jit(narrow(name, backend=backend).apply)(variables, images)
            for backend in ("interpret", "xla")
        )
    assert jnp.abs(interpreted - xla).max() <= 1e-5 * jnp.abs(xla).max()
