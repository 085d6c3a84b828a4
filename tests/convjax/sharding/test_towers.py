"""AlexNet on two devices is AlexNet on one: numbers, dropout, checkpoints; and where they talk."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from convjax import create_model, load_weights, save_weights
from convjax.sharding import BATCH, TOWERS, Towers, make_mesh, shard, shardings
from convjax.sharding.collectives import collectives_of
from convjax.sharding.program import Program
from convjax.sharding.targets import NoPluginError, target

KEY = jax.random.key(0)
IMAGES = jax.random.normal(jax.random.key(1), (16, 67, 67, 3))
LABELS = jnp.arange(16) % 8
OPTIMISER = optax.sgd(0.01, momentum=0.9)
FIELDS = {"widths": (16, 32, 32, 32, 32), "dense_width": 64, "num_classes": 8}
MESHES = {"two devices": {"data": 1, "tower": 2}, "eight": {"data": 2, "fsdp": 2, "tower": 2}}


def narrow(**fields):
    return create_model("alexnet", kernel_stddev=0.05, **{**FIELDS, **fields})


def make_step(model):
    def step(params, opt_state, number, images, labels):
        def loss(params):
            key = jax.random.fold_in(jax.random.key(2, impl="rbg"), number)  # compiles fast
            logits = model.apply({"params": params}, images, train=True, rngs={"dropout": key})
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, opt_state = OPTIMISER.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value, gradients

    return jax.jit(step)


def trained(model, params, images, labels, steps=10):
    """Parameters after the steps, the loss before each, the first gradients, and the program."""
    opt_state, losses, first = OPTIMISER.init(params), [], None
    compiled = make_step(model).lower(params, opt_state, 0, images, labels).compile()
    for number in range(steps):
        params, opt_state, loss, gradients = compiled(params, opt_state, number, images, labels)
        losses.append(float(loss))
        first = gradients if first is None else first
    return params, losses, first, compiled


@pytest.fixture(scope="module")
def params():
    return narrow().init(KEY, IMAGES)["params"]


@pytest.fixture(scope="module")
def on_one_device(params):
    return trained(narrow(), params, IMAGES, LABELS)


def assert_equal_to_rounding(split, whole):
    """Up to 2e-6 of the tree's largest number.

    Not of each array's: where rounding decides whether a ReLU passes one pixel, a bias that is a
    thousandth of the others as a whole differs by 2e-5 of itself (seen on jax 0.12).
    """
    split, whole = jax.device_get((split, whole))
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(whole))
    for a, b in zip(jax.tree.leaves(split), jax.tree.leaves(whole), strict=True):
        assert np.abs(a - b).max() <= 2e-6 * largest


def talk(compiled, mesh, params):
    """(pass, kind, layer) of what the towers say, and the kinds of all other collectives."""
    found = list(collectives_of(Program.parse(compiled.as_text()), mesh, params))
    towers = [each for each in found if each.axis == "tower"]
    assert len(towers) == 7
    others = {each.kind for each in found if each.axis != "tower"}
    return {(each.phase, each.kind, each.layer) for each in towers}, others


EXCHANGES = {
    *(("forward", "all-gather", layer) for layer in ("conv3", "fc6", "fc7", "fc8")),
    # fc8 needs none: both devices have all of its gradient, and take their own part.
    *(("backward", "reduce-scatter", layer) for layer in ("conv3", "fc6", "fc7")),
}


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_ten_training_steps_with_dropout_are_those_of_one_device(params, on_one_device, sizes):
    """And the devices talk where the paper's figure crosses, and nowhere else."""
    mesh = make_mesh(**sizes)
    batch = jax.device_put((IMAGES, LABELS), NamedSharding(mesh, BATCH))
    laid_out = shard(params, mesh, TOWERS)
    split, losses, gradients, compiled = trained(Towers(narrow(), mesh), laid_out, *batch)
    after, expected_losses, expected_gradients, _ = on_one_device
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    assert_equal_to_rounding(gradients, expected_gradients)
    assert_equal_to_rounding(split, after)
    assert split["conv2"]["kernel"].addressable_shards[0].data.shape == (5, 5, 8, 16)
    assert split["fc6"]["kernel"].addressable_shards[0].data.shape == (32, 32)
    assert split["fc8"]["kernel"].addressable_shards[0].data.shape == (64, 8)
    towers, others = talk(compiled, mesh, params)
    assert towers == EXCHANGES
    assert others == (set() if len(mesh.devices.flat) == 2 else {"all-reduce"})  # of gradients


@pytest.mark.parametrize("source", ["paper", "archive"])
def test_logits_are_those_of_one_device(params, source):
    mesh, model = make_mesh(**MESHES["eight"]), narrow(source=source)
    split = jax.jit(Towers(model, mesh).apply)({"params": params}, IMAGES)
    whole = jax.jit(model.apply)({"params": params}, IMAGES)
    np.testing.assert_allclose(split, whole, rtol=0, atol=2e-6 * float(jnp.abs(whole).max()))


def test_a_checkpoint_moves_between_the_forms(params, tmp_path):
    mesh = make_mesh(data=1, tower=2)
    laid_out = {"params": shard(params, mesh, TOWERS)}
    save_weights(laid_out, tmp_path / "split.safetensors", target="convjax")
    whole = load_weights(narrow(), tmp_path / "split.safetensors", source="convjax")
    jax.tree.map(np.testing.assert_array_equal, whole["params"], jax.device_get(params))


def test_each_device_drops_its_part_of_one_mask():
    mesh = make_mesh(**MESHES["eight"])
    images = IMAGES[:8]

    def after_fc7(apply):
        params = narrow().init(KEY, images)["params"]
        # Features that are all 1 show what is dropped.
        params = jax.tree.map(jnp.zeros_like, params)
        params["fc7"]["bias"] = jnp.ones(64)
        apply = jax.jit(partial(apply, train=True, rngs={"dropout": KEY}))
        return apply({"params": params}, images)

    features = narrow(num_classes=0)
    whole = after_fc7(features.apply)
    assert set(np.unique(whole)) == {0.0, 2.0}
    split = after_fc7(Towers(features, mesh).apply)
    np.testing.assert_array_equal(split, whole)


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_h200s_talk_there_too(params, sizes, backend):
    count = int(np.prod(list(sizes.values())))
    try:
        devices = target("NVIDIA H200").devices(count)
    except NoPluginError as error:
        pytest.skip(str(error))
    mesh = make_mesh(**sizes, devices=devices)
    rows = NamedSharding(mesh, BATCH)

    def placed(tree):
        return jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
            tree,
            shardings(tree, mesh, TOWERS),
        )

    batch = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=rows) for a in (IMAGES, LABELS)]
    step = make_step(Towers(narrow(backend=backend), mesh))
    state = placed(params), placed(OPTIMISER.init(params))
    with jax.set_mesh(mesh):
        compiled = step.lower(*state, 0, *batch).compile({"xla_gpu_autotune_level": "0"})
    towers, others = talk(compiled, mesh, params)
    assert towers == EXCHANGES
    assert others == (set() if count == 2 else {"all-reduce"})


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match="tower=1 of the mesh must be the network's towers=2"):
        Towers(narrow(), make_mesh())
    others = jax.make_mesh((1, 2), ("fsdp", "tower"), devices=jax.devices()[:2])
    with pytest.raises(ValueError, match=r"axes .* must be make_mesh's"):
        Towers(narrow(), others)
    with pytest.raises(ValueError, match=r"towers=2 must divide widths=\(16, 31"):
        Towers(narrow(widths=(16, 31, 32, 32, 32)), make_mesh(tower=2))
    with pytest.raises(ValueError, match="tower_axis='tower' must be an axis of 2 devices"):
        narrow(tower_axis="tower").apply(narrow().init(KEY, IMAGES[:1]), IMAGES[:1])
    with (
        jax.set_mesh(make_mesh(tower=2)),  # which is no shard_map
        pytest.raises(ValueError, match="tower_axis='tower' must be an axis of 2 devices"),
    ):
        narrow(tower_axis="tower").apply(narrow().init(KEY, IMAGES[:1]), IMAGES[:1])
