"""C9 tells towers that part from those that do not, and keeps each network that it trained."""

import json
import os
import re
import signal

import flax.linen as nn
import numpy as np
import pytest

from convjax.data import ArraySource, load_source
from experiments.claims import c09_towers
from experiments.claims.c09_towers import CLAIM, compare_halves, holds, in_words, main

SPLIT, CONTROL = "alexnet", "alexnet_one_tower"


def layer(first, second):
    """Sixteen filters; each half has the colour index 0 (grey), 1 (opponent) or 2/3 (red)."""
    pixels = {"grey": (1, 1, 1), "opponent": (1, -1, 0), "red": (1, 0, 0), "none": (0, 0, 0)}
    half = [pixels[first]] * 8 + [pixels[second]] * 8
    return compare_halves(np.array(half, np.float32).T.reshape(1, 1, 3, 16))


def networks(split, control, seeds=3):
    return {
        (network, seed): layers
        for network, layers in ((SPLIT, split), (CONTROL, control))
        for seed in range(seeds)
    }


def test_halves_are_compared():
    halves = layer("grey", "opponent")
    np.testing.assert_allclose(halves.means, [0, 1], atol=2e-7)
    np.testing.assert_allclose(halves.difference, 1, rtol=1e-6)
    assert halves.p <= 0.001
    assert layer("red", "red").p == 1


def test_the_claim_holds_where_only_the_split_is_specialised():
    specialised, alike = layer("grey", "opponent"), layer("red", "red")
    assert holds(networks(specialised, alike))
    assert not holds(networks(alike, alike))
    assert not holds(networks(specialised, specialised))
    mixed = networks(specialised, alike)
    mixed[SPLIT, 0] = alike
    assert holds(mixed)  # two of three seeds, and 2/3 of difference
    mixed[SPLIT, 1] = alike
    assert not holds(mixed)


def test_a_small_difference_is_no_specialisation():
    values = np.array([0.95] * 8 + [1.0] * 8)
    small = compare_halves(
        np.array([(1, -v, v - 1) for v in values], np.float32).T.reshape(1, 1, 3, 16)
        + np.linspace(0, 0.2, 16, dtype=np.float32).repeat(3).reshape(16, 3).T.reshape(1, 1, 3, 16)
    )
    assert small.p < 0.05
    assert small.difference < 0.2
    assert not holds(networks(small, layer("red", "red")))


def test_words():
    trained = networks(layer("opponent", "grey"), layer("red", "red"))
    trained[SPLIT, 0] = layer("red", "grey")
    accuracies = {run: 0.5 + 0.1 * run[1] for run in trained}
    split, control = in_words(trained, trained, accuracies).split("; ")
    assert split.startswith(
        "two towers: mean colour index 0.00 ± 0.00 and 0.89 ± 0.16, apart by 0.89 ± 0.16 "
    )
    assert split.endswith("p < 0.05 in 3 of 3 seeds, test accuracy 0.60 ± 0.08")
    assert control.startswith("no split: mean colour index 0.67 ± 0.00 and 0.67 ± 0.00, apart by")
    assert "p < 0.05 in 0 of 3 seeds" in control


# the command, with a network of one convolution


class TinyNetwork(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, images, train: bool = False):
        normal = nn.initializers.normal(0.05)
        x = nn.Conv(16, (7, 7), strides=8, name="conv1", kernel_init=normal)(images)
        return nn.Dense(self.num_classes)(nn.relu(x).mean((1, 2)))


@pytest.fixture
def tiny(monkeypatch):
    """Make a smoke run learn a few random images by a tiny network."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (12, 32, 32, 3), np.uint8)
    source = ArraySource(images, np.arange(12) % 2, ("a", "b"))
    monkeypatch.setattr(c09_towers, "load_source", lambda name, split: source)
    monkeypatch.setattr(
        c09_towers, "create_model", lambda name, *, num_classes, **fields: TinyNetwork(num_classes)
    )


def test_command_is_continued_where_a_signal_stopped_it(tiny, tmp_path, monkeypatch, capsys):
    command = [f"--out={tmp_path}", "--preset=smoke", "--seeds=1"]
    compare = c09_towers._first_layer
    calls = []

    def stop_in_the_second_network(state):
        calls.append(state)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return compare(state)

    monkeypatch.setattr(c09_towers, "_first_layer", stop_in_the_second_network)
    assert main(CLAIM, "doc", command) == 128 + 15
    assert "the same command continues" in capsys.readouterr().err
    assert not (tmp_path / "c09_towers.json").exists()
    first = tmp_path / "c09_towers/parts/smoke/alexnet-seed0.npz"
    written = first.stat().st_mtime_ns

    assert main(CLAIM, "doc", command) == 0
    assert "C9: 1 of 2 networks to train on colour_patches" in capsys.readouterr().out
    assert first.stat().st_mtime_ns == written
    row = json.loads((tmp_path / "c09_towers.json").read_text())
    assert row["holds"] in ("yes", "no")
    assert row["figures"] == ["c09_towers/filters.png", "c09_towers/index.png"]
    for figure in row["figures"]:
        assert (tmp_path / figure).read_bytes().startswith(b"\x89PNG")
    with np.load(first) as arrays:
        assert arrays["trained"].shape == (7, 7, 3, 16)
        np.testing.assert_allclose(arrays["initial"].std(), 0.002, rtol=0.05)
        assert not np.array_equal(arrays["initial"], arrays["trained"])


@pytest.mark.slow
def test_smoke_run(tmp_path):
    assert main(CLAIM, "doc", [f"--out={tmp_path}", "--preset=smoke"]) == 0
    row = json.loads((tmp_path / "c09_towers.json").read_text())
    assert row["holds"] == "no"  # after four steps
    assert "in 0 of 2 seeds" in row["measured"]


@pytest.mark.parametrize(
    ("source", "status", "message"),
    [
        (
            "fashion_mnist_small",
            2,
            r"error: --source=fashion_mnist_small: images of \(28, 28, 1\) must be of one size, in",
        ),
        ("folder:/none", 1, "error: no folder /none"),
        (
            "small",
            2,
            "error: alexnet on these images: images of 8×8 pixels are too small: at least",
        ),
        ("unknown", 2, "error: --source=unknown: unknown source"),
    ],
)
def test_images_that_cannot_be_learnt_are_one_line(
    tmp_path, monkeypatch, capsys, source, status, message
):
    def load(name, split):
        if name == "unknown":
            raise ValueError("unknown source")
        if name == "small":
            return ArraySource(np.zeros((2, 8, 8, 3), np.uint8), np.arange(2), ("a", "b"))
        return load_source(name, split)

    monkeypatch.setattr(c09_towers, "load_source", load)
    assert main(CLAIM, "", [f"--out={tmp_path}", "--preset=smoke", f"--source={source}"]) == status
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.match(message, error)
    assert not list(tmp_path.glob("*.json"))
