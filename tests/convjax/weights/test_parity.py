"""Networks with torch's weights compute what torch computes: `tests/goldens` holds its figures.

Weights are filled by the goldens' rule over the names that our own mapping gives, and then read
through it; so names, shapes, layouts and the networks' arithmetic are all at stake.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convjax.models import create_model
from convjax.weights.entries import Table, flat, flat_shapes, from_file, to_file
from convjax.weights.tables import make_table
from tests.goldens import rule

GOLDENS = Path(__file__).parents[2] / "goldens"
MAP = {"pool": "map"}
QK_NORM = {"qk_norm": True, "layer_scale": 1e-5}

# torch's network: ours.
MODELS = {
    "torchvision_alexnet": ("alexnet_owt", {}),
    **{
        f"torchvision_{name}": (name, {})
        for name in (
            *(f"vgg{depth}{norm}" for depth in (11, 13, 16, 19) for norm in ("", "_bn")),
            *(f"resnet{depth}" for depth in (18, 34, 50, 101, 152)),
        )
    },
    "torchvision_googlenet": ("googlenet_torchvision", {}),
    "torchvision_vit_b_16": ("vit_b16", {}),
    "torchvision_vit_b_32": ("vit_b32", {}),
    "torchvision_vit_l_16": ("vit_l16", {}),
    "torchvision_vit_l_32": ("vit_l32", {}),
    "torchvision_vit_h_14": ("vit_h14", {}),
    "timm_vit_tiny_patch16_224": ("vit_ti16", {}),
    "timm_vit_small_patch16_224": ("vit_s16", {}),
    "timm_vit_small_patch32_224": ("vit_s32", {}),
    "timm_vit_base_patch16_224": ("vit_b16", {}),
    "timm_vit_base_patch32_224": ("vit_b32", {}),
    "timm_vit_small_qk_norm": ("vit_s16", QK_NORM),
    "timm_vit_small_map": ("vit_s16", MAP),
    "timm_vit_small_avg": ("vit_s16", {"pool": "average"}),
    "timm_vit_small_avg_fc_norm": ("vit_s16", {"pool": "average", "norm_pooled": True}),
    "timm_resnet18": ("resnet18", {}),
    "timm_resnet50": ("resnet50", {}),
    "timm_resnet101": ("resnet101", {}),
}
QUICK = {
    "torchvision_alexnet",
    "torchvision_resnet18",
    "torchvision_googlenet",
    "timm_vit_tiny_patch16_224",
}
# Of gradients' norms, against torch's float64. GoogLeNet's go through up to 57 batch norms over two
# images: torch's own float32 is 3.1e-3 off.
GRADIENT_TOLERANCE = {"torchvision_googlenet": 4e-3}
# Without dropout, which no two libraries draw alike.
TRAINED = {
    "torchvision_alexnet": {"dropout": 0.0},
    "torchvision_googlenet": {"dropout": 0.0, "auxiliary_dropout": 0.0},
    "torchvision_resnet18": {},
    "timm_vit_tiny_patch16_224": {},
}


def marked(names, slow):
    return [pytest.param(name, marks=[pytest.mark.slow] if slow(name) else []) for name in names]


def golden(name):
    with np.load(GOLDENS / f"{name}.npz") as file:
        return {key: file[key] for key in file.files}


def text(values):
    return json.loads(values.tobytes())


def images():
    return jnp.asarray(rule.images().transpose(0, 2, 3, 1))


def filled(name, **fields):
    """Our model, its table, and its variables by the rule."""
    ours, own = MODELS[name]
    model = create_model(ours, **own, **fields)
    shapes = jax.eval_shape(
        model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    )
    table = make_table(flat_shapes(shapes), name.partition("_")[0], model)
    tensors = {each: rule.filled(each, shape) for each, shape in table.tensors().items()}
    arrays = from_file(table, tensors)
    leaves = [jnp.asarray(arrays.pop(path)) for path in flat_shapes(shapes)]
    return model, table, jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def names_and_shapes(table: Table):
    return {
        **{name: list(shape) for name, shape in table.tensors().items()},
        **{name: [] for name in table.counters},
    }


def error(ours, theirs):
    """The largest difference, in parts of the largest logit."""
    return float(np.abs(np.asarray(ours, np.float32) - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize("name", marked(MODELS, lambda name: name not in QUICK))
def test_names_shapes_and_logits(name):
    model, table, variables = filled(name)
    assert names_and_shapes(table) == text(golden(name)["entries"])
    expected = golden(name)["logits"]
    found = jax.jit(model.apply)(variables, images())
    measured = error(found, expected)
    print(f"{name} float32 {measured:.1e}")
    assert measured <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_logits_in_bfloat16(name):
    model, _, variables = filled(name, dtype=jnp.bfloat16)
    expected = golden(name)["logits"]
    found = jax.jit(model.apply)(variables, images())
    measured = error(found, expected)
    print(f"{name} bfloat16 {measured:.1e}")
    assert measured <= 3e-2


@pytest.mark.parametrize("name", marked(TRAINED, lambda name: "vit" not in name))
def test_training(name):
    expected = golden(name)
    model, table, variables = filled(name, **TRAINED[name])
    labels = jnp.asarray([3, 7])

    def loss(params):
        logits, sown = model.apply(
            {**variables, "params": params},
            images(),
            train=True,
            rngs={"dropout": jax.random.key(0)},
            mutable=["batch_stats", "auxiliary_logits"],
        )
        heads = {name: head["logits"][0] for name, head in sown.get("auxiliary_logits", {}).items()}
        total = cross_entropy(logits, labels)
        for auxiliary in heads.values():
            total += 0.3 * cross_entropy(auxiliary, labels)
        return total, {"train_logits": logits, **heads}

    (total, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(
        variables["params"]
    )
    for key, value in logits.items():
        assert error(value, expected[key]) <= 1e-4, key
    assert abs(float(total) - expected["loss"]) <= 1e-4 * expected["loss"]
    tensors = to_file(table, flat({**variables, "params": gradients}))
    parameters = text(expected["parameters"])
    norms = np.asarray([np.linalg.norm(tensors[each].astype(np.float64)) for each in parameters])
    off = np.abs(norms / expected["gradient_norms"] - 1).max()
    print(f"{name} gradients {off:.1e}")
    assert off <= GRADIENT_TOLERANCE.get(name, 5e-4)


def cross_entropy(logits, labels):
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(2), labels])
