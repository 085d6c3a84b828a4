"""AlexNet: the paper's sizes and starts, its authors' code, and towers that do not talk."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convjax import create_model
from convjax.layers import max_pool
from tests.convjax.models.families import narrow

KEY = jax.random.key(0)


def taps(model, variables, images):
    _, taps = model.apply(variables, images, capture_intermediates=True, mutable=["intermediates"])
    modules = taps["intermediates"].items()
    return {name: tap["__call__"][0] for name, tap in modules if name != "__call__"}


@pytest.mark.parametrize("size", [224, 227])
def test_sizes_of_the_papers_figure(size):
    model = create_model("alexnet")
    images = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
    shapes = jax.eval_shape(lambda v, x: taps(model, v, x), model.shapes(images), images)
    assert shapes["conv1"].shape == (1, 55, 55, 96)
    assert shapes["conv2"].shape == (1, 27, 27, 256)
    assert shapes["conv3"].shape == shapes["conv4"].shape == (1, 13, 13, 384)
    assert shapes["conv5"].shape == (1, 13, 13, 256)
    assert model.shapes(images)["params"]["fc6"]["kernel"].shape == (6 * 6 * 256, 4096)
    assert model.shapes(images)["params"]["conv2"]["kernel"].shape == (5, 5, 48, 256)
    assert model.shapes(images)["params"]["conv3"]["kernel"].shape == (3, 3, 256, 384)


def test_zfnets_sizes_are_its_figures():
    model = create_model("zfnet")
    images = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    shapes = jax.eval_shape(lambda v, x: taps(model, v, x), model.shapes(images), images)
    assert [shapes[f"conv{i}"].shape[1] for i in range(1, 6)] == [110, 26, 13, 13, 13]
    assert model.shapes(images)["params"]["fc6"]["kernel"].shape == (6 * 6 * 256, 4096)


@pytest.mark.parametrize(("source", "wide"), [("paper", 0.01), ("archive", 0.03)])
def test_parameters_start_as_in_the_source(source, wide):
    fields = {"widths": (32, 64, 64, 64, 64), "dense_width": 64, "source": source}
    params = narrow("alexnet", **fields).init(KEY, jnp.zeros((1, 64, 64, 3)))["params"]
    stds = {"conv1": 0.01, "conv2": 0.01, "conv3": wide, "conv4": wide, "conv5": wide}
    stds |= {"fc6": 0.01, "fc7": 0.01}
    for name, std in stds.items():
        assert abs(float(params[name]["kernel"].std()) / std - 1) < 0.05, name
    for name in ("conv2", "conv4", "conv5", "fc6", "fc7"):
        np.testing.assert_array_equal(params[name]["bias"], 1.0)
    for name in ("conv1", "conv3", "fc8"):
        np.testing.assert_array_equal(params[name]["bias"], 0.0)


def test_a_tower_sees_the_other_one_in_conv3_alone():
    """A change in tower 1's conv1 reaches tower 2 at conv3."""
    model, images = narrow("alexnet"), jax.random.normal(KEY, (1, 64, 64, 3))
    variables = model.init(KEY, images)
    changed = jax.tree.map(jnp.copy, variables)
    changed["params"]["conv1"]["kernel"] = changed["params"]["conv1"]["kernel"].at[..., :4].mul(-9)
    before, after = (taps(model, v, images) for v in (variables, changed))
    for name, reached in [("conv1", False), ("conv2", False), ("conv3", True)]:
        second = [tap[name][..., tap[name].shape[-1] // 2 :] for tap in (before, after)]
        assert bool(jnp.any(second[0] != second[1])) is reached, name
        assert bool(jnp.any(before[name] != after[name])), name


def test_the_archives_order_is_norm_pool_relu():
    model = narrow("alexnet", source="archive")
    images = jax.random.normal(KEY, (1, 64, 64, 3))
    variables = model.init(KEY, images)
    seen = taps(model, variables, images)
    assert seen["conv1"].min() < 0
    # fc6 reads what is positive after the last pooling.
    pooled = jax.nn.relu(max_pool(seen["conv5"], (3, 3), (2, 2), ceil_mode=True)).reshape(1, -1)
    fc6 = variables["params"]["fc6"]
    want = jax.nn.relu(pooled @ fc6["kernel"] + fc6["bias"].reshape(1, -1))
    np.testing.assert_allclose(seen["fc6"], want, rtol=1e-5)
    paper = taps(narrow("alexnet"), variables, images)
    assert paper["conv1"].min() == 0


def test_response_normalisation_can_be_another_convention():
    images = jax.random.normal(KEY, (1, 64, 64, 3))
    variables = narrow("alexnet").init(KEY, images)
    variables["params"]["conv1"]["kernel"] *= 1000  # so that the sums of squares count
    outputs = [
        narrow("alexnet", response_norm=convention).apply(variables, images)
        for convention in (None, "paper", "caffe")
    ]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert jnp.any(outputs[0] != outputs[2])


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_source():
    with pytest.raises(ValueError, match="source='original' must be one of 'paper', 'archive'"):
        narrow("alexnet", source="original").init(KEY, jnp.zeros((1, 64, 64, 3)))
