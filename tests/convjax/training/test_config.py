"""Config files and overrides: what is read, and what is refused in which words."""

import json

import pytest

from convjax.training.config import differing_fields, from_dict, load_config, to_dict
from convjax.training.errors import ConfigError

CONFIG = """
from ml_collections import ConfigDict

RATE = 0.5

def get_config():
    config = ConfigDict()
    config.model = {"name": "resnet8_cifar", "fields": {"widths": [4, 8, 8]}}
    config.data = {"name": "digits", "batch_size": 32, "mean": (0.3,), "std": (0.4,)}
    config.optimiser = {"learning_rate": RATE}
    config.epochs = 3
    return config
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(CONFIG)
    return path


def test_file_values_and_defaults(path):
    config = load_config(path)
    assert config.model.name == "resnet8_cifar"
    assert config.model.fields == {"widths": (4, 8, 8)}
    assert config.data.std == (0.4,)
    assert config.optimiser.learning_rate == 0.5
    assert (config.epochs, type(config.epochs)) == (3.0, float)
    assert (config.optimiser.momentum, config.seed, config.data.augmentation.flip) == (
        0.9,
        0,
        False,
    )


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("seed", "7", 7),
        ("optimiser.learning_rate", "1e-3", 0.001),
        ("optimiser.learning_rate", "1", 1.0),
        ("optimiser.nesterov", "true", True),
        ("optimiser.nesterov", "False", False),
        ("optimiser.gradient_clip_norm", "2.5", 2.5),
        ("optimiser.gradient_clip_norm", "none", None),
        ("optimiser.name", "adamw", "adamw"),
        ("data.mean", "0.25", (0.25,)),
        ("data.mean", "(0.25,)", (0.25,)),
        ("data.data_dir", "007", "007"),
        ("data.augmentation.crop_padding", "2", 2),
        ("data.augmentation.scale", "0.5, 1", (0.5, 1.0)),
        ("model.fields.zero_init_residual", "true", True),
        ("model.fields.stem", "cifar", "cifar"),
        ("model.fields.widths", "(1, 2, 3)", (1, 2, 3)),
    ],
)
def test_overrides(path, name, text, value):
    found = load_config(path, {name: text})
    for part in name.split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_overrides_make_missing_groups(path):
    config = load_config(path, {"schedule.name": "cosine", "schedule.warmup": "0.25"})
    assert (config.schedule.name, config.schedule.warmup) == ("cosine", 0.25)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("sed", "1", "unknown field sed; the nearest is seed"),
        ("learning_rate", "1", "learning_rate; the nearest is optimiser.learning_rate"),
        ("optimizer.lr", "1", "unknown field optimizer.lr; the nearest is optimiser.learning_rate"),
        ("optimiser.nestrov", "1", "nearest is optimiser.nesterov"),
        ("data.augmentation.flp", "true", "nearest is data.augmentation.flip"),
        ("seed.more", "1", "unknown field seed.more; the nearest is seed"),
        ("model.fields.a.b", "1", "unknown field model.fields.a.b; the nearest is model.fields"),
        ("seed", "one", "seed='one' must be an integer"),
        ("seed", "1.5", "seed=1.5 must be an integer"),
        ("seed", "true", "seed=True must be an integer"),
        ("seed", "-1", r"seed=-1 must be in \[0, 2\*\*32\)"),
        ("optimiser.learning_rate", "fast", "optimiser.learning_rate='fast' must be a finite num"),
        ("optimiser.learning_rate", "1e999", "optimiser.learning_rate=inf must be a finite number"),
        ("optimiser.learning_rate", "0", "optimiser.learning_rate=0.0 must be positive"),
        ("optimiser.nesterov", "1", "optimiser.nesterov=1 must be True or False"),
        ("optimiser.name", "sdg", "optimiser.name='sdg' must be one of sgd, adamw, lamb"),
        ("optimiser", "sgd", "optimiser='sgd' must be a group of fields"),
        ("data.mean", "grey", "data.mean='grey' must be a tuple of floats"),
        ("data.mean", "('a',)", "data.mean='a' must be a finite number"),
        ("data.std", "(0.1, 0.2)", r"data.std=\(0.1, 0.2\) must be as long as mean"),
        ("data.augmentation.scale", "1", r"scale=\(1,\) must be a tuple of 2 floats"),
        ("data.augmentation.crop", "0", "data.augmentation.crop=0 must be at least 1 pixel"),
        ("model.fields.width", "{}", "model.fields.width={} must be a number, a string"),
        ("epochs", "none", "epochs=None must be given where steps is not"),
        ("steps", "5", "epochs=3.0 must be None where steps=5 is given"),
        ("schedule.boundaries", "0.5", "schedule.factors=.. must be as long as boundaries"),
        ("schedule.name", "piecewise", "boundaries=.* must be given for piecewise"),
        ("schedule.warmup", "1", r"schedule.warmup=1.0 must be in \[0, 1\)"),
    ],
)
def test_refused_overrides(path, name, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path, {name: text})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("config.epoch = 3", "unknown field epoch; the nearest is epochs"),
        ("config.optimiser.lr = 3", "unknown field optimiser.lr"),
        ("config.seed = 1.0", "seed=1.0 must be an integer"),
        ("config.log_every_steps = 0", "log_every_steps=0 must be at least 1"),
        ("config.model.fields.norm = print", "model.fields.norm=.* must be a number"),
        ("del config.data.batch_size", "data.batch_size must be given"),
        ("del config.model", "model must be given"),
        ("config.seed = undefined", "NameError: name 'undefined' is not defined"),
        ("return 3", r"config.py must define get_config\(\), which returns a ConfigDict"),
        ("1 = 2", "SyntaxError: "),
    ],
)
def test_refused_files(path, line, message):
    path.write_text(CONFIG.replace("    return", f"    {line}\n    return"))
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


def test_no_function_and_no_file(tmp_path):
    path = tmp_path / "config.py"
    with pytest.raises(ConfigError, match=f"no config file {path}"):
        load_config(path)
    path.write_text("x = 1")
    with pytest.raises(ConfigError, match="must define get_config"):
        load_config(path)


def test_json_round_trip(path):
    config = load_config(path, {"model.fields.widths": "((1, 2), 3)", "data.data_dir": "there"})
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_differing_fields(path):
    config = load_config(path)
    changes = {"seed": "3", "model.fields.extra": "none", "optimiser.learning_rate": "0.25"}
    assert differing_fields(config, config) == []
    assert sorted(differing_fields(config, load_config(path, changes))) == [
        "model.fields.extra",
        "optimiser.learning_rate",
        "seed",
    ]


def test_length_of_a_run(path):
    assert load_config(path).total_steps(45) == 135
    assert load_config(path, {"epochs": "0.5"}).total_steps(45) == 22
    assert load_config(path, {"epochs": "0.001"}).total_steps(45) == 1
    assert load_config(path, {"epochs": "none", "steps": "17"}).total_steps(45) == 17
