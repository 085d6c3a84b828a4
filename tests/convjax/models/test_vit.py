"""ViT: patches are a convolution, order is in the positions alone, and what each field changes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convjax import create_model
from convjax.layers import resize_positions, sincos_positions
from tests.compiling import quick_jit
from tests.convjax.models.families import narrow

KEY = jax.random.key(0)
small = partial(narrow, "vit_ti16", patch_size=4)


def started(model, images):
    """Variables with a head that is not zero."""
    variables = model.init(KEY, images)
    head = variables["params"]["head"]
    head["kernel"] = jax.random.normal(jax.random.key(9), head["kernel"].shape)
    return variables


@pytest.fixture
def images():
    return jax.random.normal(jax.random.key(1), (2, 8, 8, 3))


def test_patches_are_a_strided_convolution(images):
    """Each token is the dot product of one 4×4 patch, in reading order."""
    model = small()
    variables = model.init(KEY, images)
    _, taps = model.apply(variables, images, capture_intermediates=True, mutable=["intermediates"])
    tokens = taps["intermediates"]["patch_embedding"]["__call__"][0].reshape(2, 4, 16)
    kernel = variables["params"]["patch_embedding"]["kernel"].reshape(48, 16)
    for i in range(4):
        patch = images[:, 4 * (i // 2) :, 4 * (i % 2) :][:, :4, :4].reshape(2, 48)
        np.testing.assert_allclose(tokens[:, i], patch @ kernel, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pool", ["token", "average", "map"])
def test_without_positions_the_order_of_patches_does_not_matter(images, pool):
    model = small(pool=pool)
    variables = started(model, images)
    mixed = jnp.concatenate([images[:, 4:], images[:, :4]], axis=1)
    apply = quick_jit(model.apply)
    with_positions = [apply(variables, x) for x in (images, mixed)]
    assert jnp.abs(with_positions[0] - with_positions[1]).max() > 1e-3
    table = variables["params"]["position_embedding"]
    variables["params"]["position_embedding"] = jnp.zeros_like(table)
    without = [apply(variables, x) for x in (images, mixed)]
    np.testing.assert_allclose(without[0], without[1], rtol=1e-4, atol=1e-4)


def test_tokens_of_the_variants():
    for name, tokens in [("vit_ti16", 197), ("vit_s32", 50), ("vit_h14", 257)]:
        shapes = create_model(name).shapes(jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32))
        assert shapes["params"]["position_embedding"].shape[1] == tokens


def test_what_the_fields_add():
    images = jax.ShapeDtypeStruct((1, 8, 8, 3), jnp.float32)
    plain = small().shapes(images)["params"]
    assert plain["blocks"]["attention"]["qkv"]["kernel"].shape == (2, 16, 48)
    assert set(plain["blocks"]) == {"norm1", "attention", "norm2", "mlp"}
    assert "class_token" not in small(pool="average").shapes(images)["params"]
    assert "position_embedding" not in small(positions="sincos").shapes(images)["params"]
    scaled = small(layer_scale=0.1, qk_norm=True).shapes(images)["params"]["blocks"]
    assert scaled["scale1"].shape == (2, 16)
    assert scaled["attention"]["query_norm"]["scale"].shape == (2, 8)
    pooled = small(pool="map").shapes(images)["params"]["pool_head"]
    assert set(pooled) == {"probe", "attention", "norm", "mlp"}


def test_a_layer_scale_of_zero_leaves_the_embeddings(images):
    model = small(layer_scale=0.0, pool="average", num_classes=0, positions="sincos")
    variables = model.init(KEY, images)
    shallow = model.clone(depth=1)
    first = {
        **variables,
        "params": {
            **variables["params"],
            "blocks": jax.tree.map(lambda leaf: leaf[:1], variables["params"]["blocks"]),
        },
    }
    np.testing.assert_array_equal(model.apply(variables, images), shallow.apply(first, images))


def test_stochastic_depth_draws_and_evaluation_does_not(images):
    model = small(stochastic_depth=0.7)
    variables = started(model, images)
    apply = quick_jit(lambda v, x, key: model.apply(v, x, train=True, rngs={"dropout": key}))
    one, other = (apply(variables, images, jax.random.key(i)) for i in (1, 2))
    assert jnp.any(one != other)
    np.testing.assert_array_equal(
        quick_jit(model.apply)(variables, images), quick_jit(small().apply)(variables, images)
    )


def test_sincos_literals():
    """At column 1 of row 0, width 8: wavelengths 1 and 10,000."""
    table = sincos_positions((2, 2), 8)[0]
    np.testing.assert_allclose(
        table[1], [np.sin(1), np.sin(1e-4), np.cos(1), np.cos(1e-4), 0, 0, 1, 1], rtol=1e-6
    )
    np.testing.assert_allclose(table[2][:4], [0, 0, 1, 1])
    assert sincos_positions((2, 2), 8, class_token=True)[0, 0].tolist() == [0.0] * 8
    with pytest.raises(ValueError, match="width=10 must be a multiple of 4"):
        sincos_positions((2, 2), 10)


def test_positions_are_resized(images):
    table = jax.random.normal(KEY, (1, 1 + 9, 6))
    np.testing.assert_allclose(resize_positions(table, (3, 3)), table, rtol=1e-5, atol=1e-6)
    larger = resize_positions(table, (5, 4))
    assert larger.shape == (1, 21, 6)
    np.testing.assert_array_equal(larger[:, 0], table[:, 0])
    level = resize_positions(jnp.ones((1, 4, 2)), (3, 5), class_token=False)
    np.testing.assert_allclose(level, np.ones((1, 15, 2)), rtol=1e-6)
    with pytest.raises(ValueError, match="8 positions of patches are not those of a square grid"):
        resize_positions(table[:, 1:], (2, 2))
    model = small()
    variables = model.init(KEY, images)
    with pytest.raises(ValueError, match=r"holds 5 positions .* 10 tokens: see .*resize_positions"):
        model.apply(variables, jnp.zeros((1, 12, 12, 3)))


@pytest.mark.usefixtures("unchecked")
def test_errors_name_the_value_and_the_rule(images):
    for fields, message in [
        ({"heads": 3}, "heads=3 must divide width=16"),
        ({"pool": "cls"}, "pool='cls' must be one of 'token', 'average', 'map'"),
        ({"stochastic_depth": 1.0}, r"stochastic_depth=1\.0 must lie in \[0, 1\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            small(**fields).init(KEY, images)
    with pytest.raises(ValueError, match="images of 8×6 pixels: patch_size=4 must divide both"):
        small().init(KEY, images[:, :, :6])
