"""Every config can be run, and the shipped ones reach what their docstrings promise."""

from pathlib import Path

import pytest

from convjax.training.config import load_config
from convjax.training.errors import ConfigError
from convjax.training.loop import train
from convjax.training.parts import assemble

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_makes_all_its_parts(path):
    config = load_config(path)
    if config.data.name.startswith("tfds:"):
        pytest.skip(f"{config.data.name} has to be prepared")
    parts = assemble(config)
    assert parts.train_data.source.num_classes == parts.test_data.source.num_classes
    assert parts.total_steps > 0


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model.backend", "triton", "'triton' needs an NVIDIA GPU"),
        ("model.fields.widths", "(4, 8)", r"widths=\(4, 8\) must be equally long"),
        ("model.fields.shortcut", "projction", "shortcut='projction' must be one of"),
        ("model.fields.widths", "3", "model: "),
        ("model.fields.num_classes", "3", "must be left out: the data gives it"),
        ("model.name", "resnet8_cifra", "nearest: resnet8_cifar"),
    ],
)
def test_what_makes_no_network_is_said_before_anything_is_written(field, value, message, tmp_path):
    config = load_config(CONFIGS[-1].with_name("quickstart.py"), {field: value})
    with pytest.raises(ConfigError, match=message):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "accuracy"), [("quickstart", 0.88), ("digits", 0.97)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_accuracy_that_is_promised(name, accuracy, seed, tmp_path):
    config = load_config(CONFIGS[0].with_name(f"{name}.py"), {"seed": str(seed)})
    assert train(config, tmp_path).test_accuracy >= accuracy
