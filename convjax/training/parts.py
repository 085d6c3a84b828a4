"""The parts of a run that its config names, checked against each other before any work is done."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Key

from convjax.data import Batch, Dataset, Source, load_source, make_dataset
from convjax.models import create_model
from convjax.models.alexnet import AlexNet
from convjax.sharding import RULES, TOWERS, Towers, make_mesh, process_rows, rules_for
from convjax.training.config import DataConfig, MeshConfig, ModelConfig, RunConfig
from convjax.training.errors import ConfigError, RunError, one_line
from convjax.training.layout import Layout
from convjax.training.optimiser import make_optimiser, make_schedule
from convjax.training.state import (
    Trainable,
    TrainState,
    abstract_state,
    count_parameters,
    create_state,
)
from convjax.training.step import make_eval_step, make_train_step


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is made of.

    Attributes:
      config: names the rest.
      train_data: batches to learn from.
      test_data: batches to measure on.
      model: the network.
      layout: where it computes.
      schedule: the learning rate at a step.
      optimiser: how gradients become updates.
      total_steps: length of the run.
      eval_every_steps: steps between measurements.
    """

    config: RunConfig
    train_data: Dataset
    test_data: Dataset
    model: Trainable
    layout: Layout
    schedule: optax.Schedule
    optimiser: optax.GradientTransformation
    total_steps: int
    eval_every_steps: int

    def abstract_state(self) -> TrainState:
        """Return the shapes, dtypes and shardings of the state."""
        shape = self.train_data.image_shape
        return abstract_state(self.model, self.optimiser, shape, self.layout.shardings_of)

    def initial_state(self) -> TrainState:
        """Return the state before the first step."""
        key, _ = self._keys()
        shape = self.train_data.image_shape
        return create_state(self.model, self.optimiser, key, shape, self.layout.shardings_of)

    def abstract_batch(self) -> Batch:
        """Return the shapes, dtypes and shardings of a training batch, over all processes."""
        rows, shape = self.config.data.batch_size, self.train_data.image_shape
        array = functools.partial(jax.ShapeDtypeStruct, sharding=self.layout.batch)
        return cast(
            Batch,
            {
                "image": array((rows, *shape), jnp.uint8),
                "label": array((rows,), jnp.int32),
                "mask": array((rows,), jnp.bool_),
            },
        )

    def train_step(self) -> jax.stages.Wrapped:
        """Return the jitted update."""
        data, config = self.config.data, self.config
        return make_train_step(
            self.model,
            self.optimiser,
            key=self._keys()[1],
            mean=data.mean,
            std=data.std,
            label_smoothing=config.label_smoothing,
            auxiliary_weight=config.auxiliary_weight,
            backend=config.model.backend,
            used=self.layout.used,
            out_shardings=(
                jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state()),
                self.layout.whole,
            ),
        )

    def summary(self, state: TrainState) -> str:
        """Return which network learns what, in a few words."""
        network = f"{self.config.model.name} ({count_parameters(state):,} parameters)"
        return f"{network} on {self.config.data.name} ({len(self.train_data.source):,} images)"

    def eval_step(self) -> jax.stages.Wrapped:
        """Return the jitted measurement."""
        data = self.config.data
        return make_eval_step(
            self.model,
            mean=data.mean,
            std=data.std,
            backend=self.config.model.backend,
            used=self.layout.used,
            out_shardings=self.layout.whole,
        )

    def _keys(self) -> tuple[Key[Array, ""], Key[Array, ""]]:
        """Return the keys of the initial parameters and of dropout."""
        init_key, dropout_key = jax.random.split(jax.random.key(self.config.seed))
        return init_key, dropout_key


def assemble(
    config: RunConfig,
    *,
    devices: Sequence[jax.Device] | None = None,
    sources: tuple[Source, Source] | None = None,
) -> Parts:
    """Open the data and make the network and its optimiser; nothing is computed yet.

    Args:
      config: of the run.
      devices: of the mesh; None takes those that there are.
      sources: training and test images in place of the config's.

    Raises:
      ConfigError: a name is unknown, or two parts do not fit together.
      RunError: the data is not on this machine.
    """
    mesh = _mesh(config.mesh, devices)
    if sources is None:
        splits = config.data.train_split, config.data.test_split
        sources = _open(config.data, splits[0]), _open(config.data, splits[1])
    train_source, test_source = sources
    train_data = _batched(config, train_source, mesh, train=True)
    test_data = _batched(config, test_source, mesh, train=False)
    channels = train_data.image_shape[2]
    if len(config.data.mean) != channels:
        raise ConfigError(
            f"data.mean={config.data.mean} must have one value for each of {channels} channels"
        )
    if train_data.image_shape != test_data.image_shape:
        raise ConfigError(
            f"training images of {train_data.image_shape} and test images of "
            f"{test_data.image_shape} must be of one shape; set data.augmentation.crop"
        )
    total_steps = config.total_steps(train_data.steps_per_epoch)
    schedule = make_schedule(config.schedule, config.optimiser.learning_rate, total_steps)
    network = _network(config.model, train_source.num_classes, train_data.image_shape)
    model, layout = _split(network, mesh, config.mesh)
    parts = Parts(
        config=config,
        train_data=train_data,
        test_data=test_data,
        model=model,
        layout=layout,
        schedule=schedule,
        optimiser=make_optimiser(config.optimiser, schedule),
        total_steps=total_steps,
        eval_every_steps=max(1, round(config.eval_every_epochs * train_data.steps_per_epoch)),
    )
    try:
        parts.abstract_state()
    except ValueError as error:  # of the rules; shapes cost nothing
        raise ConfigError(f"mesh: {one_line(error)}") from error
    return parts


def _mesh(config: MeshConfig, devices: Sequence[jax.Device] | None) -> Mesh:
    try:
        return make_mesh(config.data, config.fsdp, config.model, config.tower, devices=devices)
    except ValueError as error:
        raise ConfigError(f"mesh: {one_line(error)}") from error


def _split(network: nn.Module, mesh: Mesh, config: MeshConfig) -> tuple[Trainable, Layout]:
    """The network as it computes on the mesh, and where its parameters lie."""
    try:
        rules = RULES[config.rules or rules_for(network, mesh)]
        if rules is not TOWERS:
            return network, Layout(mesh, rules)
        if not isinstance(network, AlexNet):
            raise ValueError(f"rules='towers' split an AlexNet, not a {type(network).__name__}")
        return Towers(network, mesh), Layout(mesh, rules)
    except ValueError as error:
        raise ConfigError(f"mesh: {one_line(error)}") from error


def _open(config: DataConfig, split: str) -> Source:
    try:
        return load_source(config.name, split, data_dir=config.data_dir)
    except FileNotFoundError as error:
        raise RunError(one_line(error, width=1000)) from error
    except ValueError as error:
        raise ConfigError(f"data.name={config.name!r}: {one_line(error)}") from error


def _batched(config: RunConfig, source: Source, mesh: Mesh, *, train: bool) -> Dataset:
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    # Test batches may be longer: rows that fill the last one do not count.
    rows = config.data.batch_size if train else -(-config.data.test_batch_size // parts) * parts
    try:
        process_index, process_count = process_rows(mesh, rows)
        return make_dataset(
            source,
            batch_size=rows,
            seed=config.seed,
            augmentation=config.data.augmentation,
            train=train,
            process_index=process_index,
            process_count=process_count,
        )
    except ValueError as error:
        raise ConfigError(f"data: {one_line(error)}") from error


def _network(config: ModelConfig, num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    for field in ("num_classes", "dtype", "backend", "name"):
        if field in config.fields:
            given_by = "the data" if field == "num_classes" else f"model.{field}"
            raise ConfigError(f"model.fields.{field} must be left out: {given_by} gives it")
    if config.backend == "triton" and jax.default_backend() != "gpu":
        here = jax.default_backend()
        raise ConfigError(
            f"model.backend='triton' needs an NVIDIA GPU, and this machine has a {here}"
        )
    try:
        model = create_model(
            config.name,
            num_classes=num_classes,
            dtype=jnp.dtype(config.dtype),
            backend=config.backend,
            **config.fields,
        )
        # What the fields make of these images shows in the shapes, which cost nothing.
        images = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
        variables = jax.eval_shape(model.init, jax.random.key(0), images)
        jax.eval_shape(model.apply, variables, images)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"model: {one_line(error)}") from error
    return model
