"""A network and a set small enough that a whole run takes a second."""

from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest

from convjax.data import ArraySource
from convjax.training import parts
from convjax.training.config import RunConfig, from_dict


class TinyNetwork(nn.Module):
    """One hidden layer with a batch norm and dropout, so that all kinds of state are there."""

    num_classes: int
    width: int = 8
    dropout: float = 0.1

    @nn.compact
    def __call__(self, images, train: bool = False):
        x = nn.Dense(self.width, name="hidden")(images.reshape(images.shape[0], -1))
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, name="norm")(x)
        x = nn.Dropout(self.dropout, deterministic=not train)(nn.relu(x))
        return nn.Dense(self.num_classes, name="head")(x)


def striped_source(count: int, seed: int) -> ArraySource:
    """Noisy 4×4 images whose bright row is the label."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, count)
    images = rng.integers(0, 128, (count, 4, 4, 1))
    images[np.arange(count), labels] += 100
    return ArraySource(images.astype(np.uint8), labels, ("a", "b", "c", "d"))


@pytest.fixture(scope="session", autouse=True)
def compile_once(tmp_path_factory) -> Iterator[None]:
    """Keep what is compiled: the runs of these tests are short, and mostly the same one."""
    names = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def tiny_parts() -> Iterator[None]:
    """Make `tiny` the network and `stripes` the data that configs can name."""
    sources = {"train": striped_source(70, 0), "test": striped_source(23, 1)}

    def create_model(name, *, num_classes, dtype, backend, **fields):
        if name != "tiny":
            raise ValueError(f"unknown model {name!r}; nearest: tiny")
        return TinyNetwork(num_classes, **fields)

    def load_source(name, split, *, data_dir=None):
        if name != "stripes":
            raise FileNotFoundError(f"no set {name} in {data_dir}; make it")
        return sources[split]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "create_model", create_model)
        patch.setattr(parts, "load_source", load_source)
        yield


@pytest.fixture(scope="session")
def make_config() -> Callable[..., RunConfig]:
    """Return a maker of configs of the tiny run: 10 steps, 5 an epoch, whose last is padded."""

    def make(**changes: Any) -> RunConfig:
        values: dict[str, Any] = {
            "model": {"name": "tiny"},
            "data": {
                "name": "stripes",
                "batch_size": 16,
                "mean": (0.4,),
                "std": (0.3,),
                "test_batch_size": 10,
                "augmentation": {"flip": True},
            },
            "optimiser": {"learning_rate": 0.1, "weight_decay": 1e-3},
            "schedule": {"name": "cosine", "warmup": 0.2},
            "mesh": {"data": 1},
            "epochs": 2,
            "log_every_steps": 3,
            "checkpoint_every_steps": 4,
            "keep_checkpoints": 2,
        }
        for name, value in changes.items():
            group, _, field = name.rpartition("__")
            (values[group] if group else values)[field] = value
        return from_dict(values)

    return make


@pytest.fixture
def tiny_network() -> type[TinyNetwork]:
    """Return the class of the tiny run's network."""
    return TinyNetwork
