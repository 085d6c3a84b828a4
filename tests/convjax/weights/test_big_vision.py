"""The names that Google's vision transformers have had: all give the same variables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from convjax.weights import load_weights, save_weights
from convjax.weights.big_vision import as_today
from convjax.weights.files import read_file, write_file
from tests.convjax.weights.networks import assert_same, read, small

OLD = "Transformer/encoderblock_1/"


def saved(tmp_path, name):
    model, variables = small(name)
    path = tmp_path / "weights.npz"
    save_weights(variables, path, target="big_vision", model=model)
    return model, variables, path, read_file(path)


def test_networks_with_a_class_token_have_the_first_names(tmp_path):
    _, _, _, tensors = saved(tmp_path, "vit")
    assert len(tensors) == 2 + 2 * 16 + 6
    assert {name for name in tensors if name.startswith(OLD)} == {
        *(f"{OLD}LayerNorm_{n}/{p}" for n in (0, 2) for p in ("scale", "bias")),
        *(f"{OLD}MlpBlock_3/Dense_{n}/{p}" for n in (0, 1) for p in ("kernel", "bias")),
        *(
            f"{OLD}MultiHeadDotProductAttention_1/{layer}/{p}"
            for layer in ("query", "key", "value", "out")
            for p in ("kernel", "bias")
        ),
    }
    assert tensors["Transformer/posembed_input/pos_embedding"].shape == (1, 10, 12)
    assert tensors["cls"].shape == (1, 1, 12)
    assert tensors["embedding/kernel"].shape == (16, 16, 3, 12)
    attention = f"{OLD}MultiHeadDotProductAttention_1"
    assert tensors[f"{attention}/query/kernel"].shape == (12, 3, 4)
    assert tensors[f"{attention}/query/bias"].shape == (3, 4)
    assert tensors[f"{attention}/out/kernel"].shape == (3, 4, 12)


def test_others_have_the_names_of_today(tmp_path):
    _, _, _, tensors = saved(tmp_path, "vit_map")
    assert tensors["pos_embedding"].shape == (1, 9, 12)
    assert tensors["MAPHead_0/probe"].shape == (1, 1, 12)
    assert "Transformer/encoderblock_1/LayerNorm_1/scale" in tensors
    assert "MAPHead_0/MultiHeadDotProductAttention_0/key/kernel" in tensors


def renamed(tensors, rename):
    return {rename(name): tensor for name, tensor in tensors.items()}


def stacked(tensors):
    """Blocks along a leading axis, as under a scan."""
    first, second = "Transformer/encoderblock_0/", "Transformer/encoderblock_1/"
    return {
        name.replace("_0/", "/", 1) if name.startswith(first) else name: (
            np.stack([tensor, tensors[name.replace(first, second)]])
            if name.startswith(first)
            else tensor
        )
        for name, tensor in tensors.items()
        if not name.startswith(second)
    }


VARIANTS = {
    "prefix": lambda t: renamed(t, lambda n: f"params/{n}"),
    "optimiser": lambda t: {
        **renamed(t, lambda n: f"opt/target/{n}"),
        "opt/state/step": np.zeros((), np.int32),
    },
    "text tower": lambda t: {
        **renamed(t, lambda n: f"params/img/{n}"),
        "params/txt/embedding": np.ones(3, np.float32),
    },
    "positions in the encoder": lambda t: renamed(
        t, lambda n: n.replace("pos_embedding", "Transformer/pos_embedding")
    ),
    "inlined head": lambda t: renamed(t, lambda n: n.removeprefix("MAPHead_0/")),
    "scan": stacked,
    "scan under a prefix": lambda t: renamed(stacked(t), lambda n: f"params/{n}"),
    "bfloat16": lambda t: {n: x.astype(jnp.bfloat16) for n, x in t.items()},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_way_of_writing_the_same(tmp_path, variant):
    model, variables, path, tensors = saved(tmp_path, "vit_map")
    write_file(path, VARIANTS[variant](tensors))
    if variant == "bfloat16":
        assert np.load(path)["pos_embedding"].dtype == np.dtype("V2")  # as numpy writes it
        variables = jax.tree.map(
            lambda x: np.asarray(x).astype(jnp.bfloat16).astype("f4"), variables
        )
    assert_same(read(model, path, source="big_vision"), variables)


def test_a_class_token_whose_position_was_not_kept(tmp_path):
    """Today's big_vision adds positions before the token, so its files have no row for it."""
    model, variables, path, tensors = saved(tmp_path, "vit")
    tensors = as_today(tensors)
    tensors["pos_embedding"] = tensors["pos_embedding"][:, 1:]
    write_file(path, tensors)
    found = read(model, path, source="big_vision")
    positions = variables["params"]["position_embedding"].at[:, 0].set(0.0)
    variables["params"]["position_embedding"] = positions
    assert_same(found, variables)


def test_what_is_left_over_is_said(tmp_path):
    model, _, path, tensors = saved(tmp_path, "vit_map")
    write_file(path, {**tensors, "pre_logits/kernel": np.ones((12, 12), np.float32)})
    with pytest.raises(ValueError, match=r"does not fit the model; unexpected: pre_logits/kernel$"):
        read(model, path, source="big_vision")


class Encoder(nn.Module):
    """big_vision's network of flax's own layers, under the names that flax gives them."""

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(12, (16, 16), (16, 16), "VALID", name="embedding")(images)
        x = x.reshape(len(x), 9, 12)
        x = x + self.param("pos_embedding", nn.initializers.zeros, (1, 9, 12))
        return nn.Dense(5, name="head")(MAPHead()(Transformer(name="Transformer")(x)))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, x):
        for index in (0, 1):
            x = EncoderBlock(name=f"encoderblock_{index}")(x)
        return nn.LayerNorm(name="encoder_norm")(x)


class EncoderBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=3)(y, y)
        return x + MlpBlock()(nn.LayerNorm()(x))


class MlpBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.Dense(48)(x))
        return nn.Dense(12)(x)


class MAPHead(nn.Module):
    @nn.compact
    def __call__(self, x):
        probe = self.param("probe", nn.initializers.normal(1.0), (1, 1, 12))
        x = nn.MultiHeadDotProductAttention(num_heads=3)(jnp.tile(probe, (len(x), 1, 1)), x)
        return (x + MlpBlock()(nn.LayerNorm()(x)))[:, 0]


def test_the_same_numbers_as_flax_own_layers(tmp_path):
    """Names, layouts and order of heads are those under which flax computes the same."""
    model, variables = small("vit_map", activation="gelu_tanh")
    variables = jax.tree.map(lambda x: 0.3 * x, variables)
    save_weights(variables, tmp_path / "a.npz", target="big_vision", model=model)
    tensors = read_file(tmp_path / "a.npz")
    images = jnp.asarray(np.random.default_rng(1).normal(size=(2, 48, 48, 3)).astype("f4"))
    tree = {}
    for name, tensor in tensors.items():
        *modules, last = name.split("/")
        inner = tree
        for module in modules:
            inner = inner.setdefault(module, {})
        inner[last] = tensor
    expected = jax.jit(Encoder().apply)({"params": tree}, images)
    found = jax.jit(model.apply)(variables, images)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_another_gelu_is_refused(tmp_path):
    model, variables = small("vit")
    save_weights(variables, tmp_path / "a.npz", target="big_vision", model=model)
    with pytest.raises(ValueError, match=r"activation='gelu': big_vision's .* with 'gelu_tanh'"):
        load_weights(model, tmp_path / "a.npz", source="big_vision")
