"""What a run is: typed values, read from a config file and from the command line, checked by name.

A config file holds one function, `get_config()`, that returns an `ml_collections.ConfigDict` of the
values that differ from the defaults below:

    config = load_config("configs/quickstart.py", {"optimiser.learning_rate": "0.1"})

A name that is not here, or a value of the wrong type or out of range, is a `ConfigError` of one
line that names the value, the rule and the nearest field.
"""

import dataclasses
import json
import runpy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ml_collections import ConfigDict

from convjax.data import Augmentation
from convjax.sharding import RuleSet
from convjax.training.errors import ConfigError
from convjax.training.parsing import build, differing, override
from pallas_kernels import Backend


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which network, and how it computes.

    Attributes:
      name: as `convjax.list_models` gives it.
      dtype: of activations and products; parameters stay float32.
      backend: what runs the network's operations and its loss, as in `pallas_kernels`.
      fields: further arguments of `convjax.create_model`, by name.
    """

    name: str
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    backend: Backend = "auto"
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images, and how they are batched.

    Attributes:
      name: as `convjax.data.load_source` takes it.
      batch_size: training images a step.
      mean: subtracted from each channel, in units of white.
      std: each channel is divided by it after that, in units of white.
      data_dir: where to look for the set; None for its usual folder.
      train_split: the split that is learned.
      test_split: the split that is measured.
      test_batch_size: test images a step; more of them only cost memory.
      augmentation: how training images are varied and all are sized.
    """

    name: str
    batch_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    data_dir: str | None = None
    train_split: str = "train"
    test_split: str = "test"
    test_batch_size: int = 500
    augmentation: Augmentation = field(default_factory=Augmentation)

    def __post_init__(self) -> None:
        _check(self, "batch_size", self.batch_size >= 1, "at least 1")
        _check(self, "test_batch_size", self.test_batch_size >= 1, "at least 1")
        _check(self, "std", all(std > 0 for std in self.std), "positive")
        _check(self, "std", len(self.std) == len(self.mean), "as long as mean")


@dataclass(frozen=True, kw_only=True)
class OptimiserConfig:
    """How gradients become updates; see `convjax.training.optimiser` for the conventions.

    Attributes:
      name: a key of `convjax.training.optimiser.OPTIMISERS`.
      learning_rate: the schedule's peak.
      momentum: sgd's share of the old velocity; the others' decay of the first moment.
      second_momentum: the others' decay of the second moment.
      nesterov: look ahead along the velocity (sgd, adamw).
      epsilon: added to the root of the second moment (adamw, lamb).
      weight_decay: pull of the weights to zero; biases and norms are spared.
      gradient_clip_norm: longest gradient that is not scaled down, over all parameters; None: any.
    """

    name: Literal["sgd", "adamw", "lamb"] = "sgd"
    learning_rate: float = 0.1
    momentum: float = 0.9
    second_momentum: float = 0.999
    nesterov: bool = False
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    gradient_clip_norm: float | None = None

    def __post_init__(self) -> None:
        _check(self, "learning_rate", self.learning_rate > 0, "positive")
        _check(self, "momentum", 0 <= self.momentum < 1, "in [0, 1)")
        _check(self, "second_momentum", 0 <= self.second_momentum < 1, "in [0, 1)")
        _check(self, "epsilon", self.epsilon > 0, "positive")
        _check(self, "weight_decay", self.weight_decay >= 0, "at least 0")
        clip = self.gradient_clip_norm
        _check(self, "gradient_clip_norm", clip is None or clip > 0, "positive")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over the run, in fractions of the run: a longer one keeps its shape.

    Attributes:
      name: constant, cosine or linear (down to `final` at the end), piecewise (multiplied by
        `factors` at `boundaries`), or one_cycle (a cosine up over `warmup`, one down to `final`).
      warmup: fraction of the run that climbs to the peak, linearly from 0 but for one_cycle.
      final: the learning rate at the end as a fraction of the peak (cosine, linear, one_cycle).
      boundaries: fractions of the run at which `factors` apply (piecewise).
      factors: what the learning rate is multiplied by at each of `boundaries` (piecewise).
    """

    name: Literal["constant", "cosine", "linear", "piecewise", "one_cycle"] = "constant"
    warmup: float = 0.0
    final: float = 0.0
    boundaries: tuple[float, ...] = ()
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _check(self, "warmup", 0 <= self.warmup < 1, "in [0, 1)")
        _check(self, "final", 0 <= self.final <= 1, "in [0, 1]")
        rising = list(self.boundaries) == sorted(set(self.boundaries))
        inside = all(0 < boundary < 1 for boundary in self.boundaries)
        _check(self, "boundaries", rising and inside, "rising, in (0, 1)")
        _check(self, "factors", len(self.factors) == len(self.boundaries), "as long as boundaries")
        _check(self, "factors", all(factor > 0 for factor in self.factors), "positive")
        is_piecewise = self.name == "piecewise"
        rule = "given for piecewise, and for no other schedule"
        _check(self, "boundaries", is_piecewise == bool(self.boundaries), rule)
        one_cycle = self.name == "one_cycle"
        _check(self, "warmup", self.warmup > 0 or not one_cycle, "positive for one_cycle")
        _check(self, "final", self.final > 0 or not one_cycle, "positive for one_cycle")


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Where a run computes; a run may be continued on another mesh.

    Attributes:
      data: devices over which examples are split; one of the sizes may be -1: all that are left.
      fsdp: devices over which examples and parameters are split.
      model: devices over which layers are split.
      tower: devices over which AlexNet's towers lie.
      rules: how parameters are split; None: as the sizes say (`convjax.sharding.rules_for`).
    """

    data: int = -1
    fsdp: int = 1
    model: int = 1
    tower: int = 1
    rules: RuleSet | None = None


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run, from the seed to the last checkpoint.

    Attributes:
      model: which network.
      data: which images.
      optimiser: how gradients become updates.
      schedule: the learning rate over the run.
      mesh: where it computes.
      seed: of the parameters, the order of the images, their augmentation and dropout.
      epochs: length of the run in passes over the training images; exclusive with `steps`.
      steps: length of the run in updates; exclusive with `epochs`.
      label_smoothing: share of a label's probability that is spread over all classes.
      auxiliary_weight: of the losses of heads that only training has (GoogLeNet's: 0.3).
      log_every_steps: steps between records in metrics.jsonl.
      eval_every_epochs: passes between measurements on the test images; the end is measured too.
      checkpoint_every_steps: steps between checkpoints; each measurement makes one too.
      keep_checkpoints: newest checkpoints kept, beside the one of the best test accuracy.
    """

    model: ModelConfig
    data: DataConfig
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    seed: int = 0
    epochs: float | None = None
    steps: int | None = None
    label_smoothing: float = 0.0
    auxiliary_weight: float = 0.3
    log_every_steps: int = 20
    eval_every_epochs: float = 1.0
    checkpoint_every_steps: int = 1000
    keep_checkpoints: int = 3

    def __post_init__(self) -> None:
        _check(self, "seed", 0 <= self.seed < 2**32, "in [0, 2**32)")
        given = [length for length in (self.epochs, self.steps) if length is not None]
        _check(self, "epochs", len(given) > 0, "given where steps is not")
        _check(
            self,
            "epochs",
            len(given) < 2,
            f"None where steps={self.steps} is given (--config.epochs=None)",
        )
        _check(self, "epochs", self.epochs is None or self.epochs > 0, "positive")
        _check(self, "steps", self.steps is None or self.steps >= 1, "at least 1")
        _check(self, "label_smoothing", 0 <= self.label_smoothing < 1, "in [0, 1)")
        _check(self, "auxiliary_weight", self.auxiliary_weight >= 0, "at least 0")
        _check(self, "log_every_steps", self.log_every_steps >= 1, "at least 1")
        _check(self, "eval_every_epochs", self.eval_every_epochs > 0, "positive")
        _check(self, "checkpoint_every_steps", self.checkpoint_every_steps >= 1, "at least 1")
        _check(self, "keep_checkpoints", self.keep_checkpoints >= 1, "at least 1")

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the length of the run in updates, at least 1."""
        if self.epochs is None:
            return self.steps or 1
        return max(1, round(self.epochs * steps_per_epoch))


def load_config(path: str | Path, overrides: Mapping[str, str] | None = None) -> RunConfig:
    """Run the config file at `path` and return its values, with `overrides` in their place.

    Args:
      path: a Python file that defines `get_config()`. It is the user's own, and executed.
      overrides: dotted field names, such as `optimiser.learning_rate`, and values as typed.

    Raises:
      ConfigError: no such file, an error in it, or a name or value that is not allowed.
    """
    if not Path(path).is_file():
        raise ConfigError(f"no config file {path}")
    try:
        config = runpy.run_path(str(path)).get("get_config", lambda: None)()
    except Exception as error:  # whatever the user's own code raises
        raise ConfigError(f"{path}: {type(error).__name__}: {error}") from error
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"{path} must define get_config(), which returns a ConfigDict")
    values = config.to_dict()
    for name, text in (overrides or {}).items():
        override(values, RunConfig, name, text)
    return from_dict(values)


def from_dict(values: Mapping[str, Any]) -> RunConfig:
    """Build a config from nested values, such as those of `to_dict`.

    Raises:
      ConfigError: a name or value that is not allowed.
    """
    return build(RunConfig, values)


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Return the config as nested values that JSON keeps as they are."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def differing_fields(one: RunConfig, other: RunConfig) -> list[str]:
    """Return the dotted names of the fields whose values differ, but for those of the mesh."""
    names = differing(to_dict(one), to_dict(other))
    return [name for name in names if not name.startswith("mesh.")]


def _check(config: Any, name: str, holds: bool, rule: str) -> None:
    if not holds:
        raise ConfigError(f"{name}={getattr(config, name)!r} must be {rule}")
