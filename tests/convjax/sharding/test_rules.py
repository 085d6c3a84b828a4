"""Rules: which one decides, what they refuse, and networks that compute the same when split."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from convjax import create_model
from convjax.sharding import (
    BATCH,
    DATA_PARALLEL,
    DENSE_PARALLEL,
    FSDP,
    ONE_WEIRD_TRICK,
    TENSOR_PARALLEL_VIT,
    gathered,
    make_mesh,
    over_largest,
    rules_for,
    shard,
    shardings,
    specs,
)
from convjax.sharding.collectives import collectives_of
from convjax.sharding.program import Program

KEY = jax.random.key(0)
TREE = {"conv1": {"kernel": jnp.zeros((3, 3, 8, 16)), "bias": jnp.zeros(16)}}


def test_the_first_rule_that_matches_the_paths_end_decides():
    mesh = make_mesh(data=2, model=4)
    rules = ((r"conv\d/kernel", P(None, None, None, "model")), ("kernel", P("data")), (".*", P()))
    assert specs(TREE, mesh, rules)["conv1"] == {
        "kernel": P(None, None, None, "model"),
        "bias": P(),
    }
    assert specs({"a": {"preconv1": {"kernel": jnp.zeros(8)}}}, mesh, rules)["a"] == {
        "preconv1": {"kernel": P("data")}
    }


def test_rules_of_parameters_hold_for_what_an_optimiser_remembers():
    mesh, rules = (
        make_mesh(data=2, model=4),
        (("kernel", P(None, None, None, "model")), (".*", P())),
    )
    remembered = specs(optax.adam(1e-3).init(TREE), mesh, rules)[0]
    assert remembered.mu["conv1"]["kernel"] == P(None, None, None, "model")
    assert remembered.nu["conv1"]["bias"] == P()
    assert remembered.count == P()


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ((("kernel", P()),), r"no rule matches conv1/bias \[16\]: the patterns are 'kernel'"),
        ((("bias", P("model", None)), (".*", P())), r"conv1/bias \[16\] has fewer dimensions than"),
        ((("bias", P("rows")), (".*", P())), r"conv1/bias: .* names 'rows', and the mesh has data"),
        (
            (("kernel", P("model")), (".*", P())),
            r"conv1/kernel \[3, 3, 8, 16\]: model=4 must divide its dimension of 3",
        ),
        (
            ((".*", P(("data", "model"))),),
            r"conv1/kernel \[3, 3, 8, 16\]: data=2 × model=4 must divide its dimension of 3",
        ),
    ],
)
def test_rules_that_do_not_fit_name_the_parameter_and_the_rule(rules, message):
    if message.startswith("conv1/kernel"):
        rules = tuple(reversed(rules)) if rules[0][0] == ".*" else rules
    with pytest.raises(ValueError, match=message):
        shard(TREE, make_mesh(data=2, model=4), rules)


def test_fsdp_splits_the_longest_dimension_that_it_divides():
    mesh, spec = make_mesh(data=2, fsdp=4), over_largest("fsdp", at_least=64)
    assert spec((3, 3, 8, 16), mesh) == P(None, None, None, "fsdp")
    assert spec((64, 8), mesh) == P("fsdp")
    assert spec((7, 9, 8), mesh) == P(None, None, "fsdp")
    assert spec((7, 99), mesh) == P()
    assert spec((16,), mesh) == P()  # small
    assert spec((64, 8), make_mesh()) == P()
    held = shard({"w": jnp.zeros((256, 64))}, mesh, FSDP)["w"]
    assert held.addressable_shards[0].data.shape == (64, 64)


def test_ready_rules_by_network_and_mesh():
    vit, vgg, resnet = map(create_model, ("vit_ti16", "vgg11", "resnet18"))
    assert rules_for(resnet, make_mesh()) == "data_parallel"
    assert rules_for(resnet, make_mesh(fsdp=2)) == "fsdp"
    assert rules_for(vit, make_mesh(model=2)) == "tensor_parallel_vit"
    assert rules_for(vgg, make_mesh(model=2)) == "dense_parallel"
    assert rules_for(create_model("alexnet"), make_mesh(tower=2)) == "towers"
    with pytest.raises(ValueError, match="no ready rules split ResNet over model=2"):
        rules_for(resnet, make_mesh(model=2))
    with pytest.raises(ValueError, match="no ready rules split VGG over tower=2"):
        rules_for(vgg, make_mesh(tower=2))
    with pytest.raises(ValueError, match="no ready rules split VGG over stage=8"):
        rules_for(vgg, jax.make_mesh((8,), ("stage",)))


NETWORKS = {
    "vit": lambda: create_model(
        "vit_ti16", patch_size=8, width=32, depth=3, heads=4, num_classes=8
    ),
    "vgg": lambda: create_model(
        "vgg11",
        stage_sizes=(1, 1),
        widths=(8, 16),
        dense_width=32,
        pooled=(2, 2),
        num_classes=8,
        dropout=0.0,
    ),
    "resnet": lambda: create_model("resnet20_cifar", widths=(8, 8, 16), num_classes=8),
}


def loss_and_gradients(model, variables, images, labels, used=lambda params: params):
    rest = {name: values for name, values in variables.items() if name != "params"}

    def loss(params):
        logits, _ = model.apply(
            {"params": used(params), **rest}, images, train=True, mutable=["batch_stats"]
        )
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return jax.value_and_grad(loss)(variables["params"])


@pytest.fixture(scope="module")
def on_one_device():
    """Of each network: variables without zeros, images, labels, loss and gradients."""
    images = jax.random.normal(KEY, (16, 16, 16, 3))
    labels = jnp.arange(16) % 8
    found = {}
    for name, make in NETWORKS.items():
        variables = make().init(KEY, images)
        params = jax.tree.map(
            lambda a: a if a.any() else a + 0.1 * jax.random.normal(KEY, a.shape),
            variables["params"],
        )
        variables = variables | {"params": params}
        step = jax.jit(loss_and_gradients, static_argnums=0)
        found[name] = variables, images, labels, *step(make(), variables, images, labels)
    return found


FSDP_OF_SMALL = ((".*", over_largest("fsdp", at_least=64)),)
SPLITS = [
    ("vit", {"data": 8}, DATA_PARALLEL, {"all-reduce"}),
    ("vit", {"data": 2, "model": 4}, TENSOR_PARALLEL_VIT, {"all-reduce"}),
    ("vit", {"data": 2, "fsdp": 4}, FSDP_OF_SMALL, None),
    ("vgg", {"data": 2, "model": 4}, DENSE_PARALLEL, {"all-reduce"}),
    ("vgg", {"data": 8}, ONE_WEIRD_TRICK, {"all-reduce", "all-gather"}),
    ("resnet", {"data": 2, "fsdp": 4}, FSDP_OF_SMALL, None),
]


@pytest.mark.parametrize(
    ("name", "sizes", "rules", "collectives", "explicit"),
    [(*split, False) for split in SPLITS] + [(*SPLITS[i], True) for i in (1, 2)],
)
def test_a_split_network_computes_the_same(
    on_one_device, name, sizes, rules, collectives, explicit
):
    variables, images, labels, loss, gradients = on_one_device[name]
    mesh = make_mesh(**sizes, explicit=explicit)
    with jax.set_mesh(mesh):
        laid_out = shard(variables, mesh, rules)
        batch = jax.device_put((images, labels), NamedSharding(mesh, BATCH))
        layout = shardings(laid_out["params"], mesh, rules)
        step = jax.jit(
            partial(loss_and_gradients, used=partial(gathered, mesh=mesh, rules=rules)),
            static_argnums=0,
            out_shardings=(NamedSharding(mesh, P()), layout),
        )
        compiled = step.lower(NETWORKS[name](), laid_out, *batch).compile()
        split_loss, split = compiled(laid_out, *batch)
    np.testing.assert_allclose(split_loss, loss, rtol=1e-6)
    scale = float(optax.tree.norm(gradients))
    for path, expected in jax.tree.leaves_with_path(gradients):
        actual = split
        for key in path:
            actual = actual[key.key]
        error = float(jnp.linalg.norm(expected - jax.device_get(actual))) / scale
        assert error < 1e-5, (jax.tree_util.keystr(path), error)
    found = list(collectives_of(Program.parse(compiled.as_text()), mesh, variables["params"]))
    if collectives is not None:
        assert {each.kind for each in found} == collectives
        return
    # Of FSDP, no more is gathered than parameters.
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(variables["params"]))
    gathers = [each for each in found if each.kind == "all-gather"]
    assert {each.axis for each in gathers} == {"fsdp"}
    assert {each.kind for each in found} == {"all-gather", "all-reduce"}
    assert 0.5 * held < sum(each.size * each.devices for each in gathers) <= held
