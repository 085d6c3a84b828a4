"""C9: without exchange in layers 1 and 2, one tower learns colour, the other edges without colour.

Claim. Krizhevsky, Sutskever, Hinton (2012), section 6.1: "The kernels on GPU 1 are largely
color-agnostic, while the kernels on GPU 2 are largely color-specific. This kind of specialization
occurs during every run and is independent of any particular random weight initialization."

Method. Narrow AlexNets learn colour patches of photographs, from several seeds: with two towers,
and as the control without the split, whose first-layer filters are divided into two halves as they
lie. The colour index of a filter (`convjax.analysis.colour_index`) is the share of its energy that
is chromatic: 0 sees no colour, 2/3 is noise, 1 sees nothing else. Of each network the difference of
the halves' mean indices is compared with 10,000 random divisions of the same filters. The claim
holds if in most seeds the towers of the split differ with p < 0.05, by 0.2 or more on average (by
less they would be unlike, but not a blind one and a specific one), and the control's halves do not.

It can show whether the split alone is enough for towers to part in a small network, in minutes. It
cannot show what ninety passes over ImageNet do: colour alone tells most of these photographs apart,
and what a thousand steps need is not the paper's: AdamW in place of SGD, no dropout, kernels from
wider normals (narrow networks learn nothing from 0.01) and those of the first layer from N(0,
0.002²), so that what they begin with, noise, is not most of what they end with.

    python -m experiments.claims.c09_towers --out=runs/claims [--preset=cpu|gpu|smoke] [--seeds=5]

`--source` names other colour images, such as tfds:cifar10. The preset `cpu` needs about eight
minutes of processor time. A stopped run is continued by the same command, but for the network that
it was training.

Measured with `cpu`, five seeds (± is the deviation over seeds): the towers' mean indices lie 0.10 ±
0.07 apart, twice what random divisions give (0.05), with p = 0.91, 0.033, 0.061, 0.0003 and 0.48;
the halves of the control 0.04 ± 0.02, as by chance. So towers tend to part, but not in every run,
and none is blind to colour: the claim does not hold here.
"""

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float32
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from convjax import create_model
from convjax.analysis import Specialisation, colour_index, specialisation, tower_means
from convjax.data import Augmentation, Dataset, Source, load_source, make_dataset
from convjax.training.config import OptimiserConfig, ScheduleConfig
from convjax.training.display import Display
from convjax.training.errors import ConfigError, RunError, one_line
from convjax.training.optimiser import make_optimiser, make_schedule
from convjax.training.state import TrainState, create_state
from convjax.training.step import make_eval_step, make_train_step
from convjax.training.workdir import writing
from experiments.claims.claim import Arrays, Claim, Measurement, Preset, Task, main

NETWORKS = {"alexnet": "two towers", "alexnet_one_tower": "no split"}

# One deviation for all channels: the grey axis of the filters is then that of the pixels.
_MEAN, _STD = (0.4, 0.4, 0.4), (0.28, 0.28, 0.28)
_SIGNIFICANT, _LARGE = 0.05, 0.2
_TEST_BATCH_SIZE = 243
_SHOW_EVERY = 20
_FIELDS = ("widths", "dense_width", "stem_size", "stem_strides", "kernel_stddev")


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a network of a preset learns; names are those of `AlexNet` and of the configs.

    Attributes:
      first_stddev: of the normal from which the first layer starts, in place of `kernel_stddev`.
    """

    widths: tuple[int, int, int, int, int]
    dense_width: int
    stem_size: int
    stem_strides: int
    steps: int
    batch_size: int
    kernel_stddev: float = 0.05
    first_stddev: float = 0.002
    learning_rate: float = 1e-3
    weight_decay: float = 0.5


PRESETS: dict[Preset, Training] = {
    "cpu": Training(
        widths=(64, 64, 64, 64, 64),
        dense_width=128,
        stem_size=7,
        stem_strides=2,
        steps=900,
        batch_size=32,
    ),
    "gpu": Training(
        widths=(96, 256, 384, 384, 256),
        dense_width=1024,
        stem_size=11,
        stem_strides=1,
        steps=20_000,
        batch_size=128,
        kernel_stddev=0.02,
        learning_rate=3e-4,
    ),
    "smoke": Training(
        widths=(16, 8, 8, 8, 8),
        dense_width=8,
        stem_size=7,
        stem_strides=2,
        steps=4,
        batch_size=8,
    ),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Halves:
    """The first layer of one network, as two towers or two halves.

    Attributes:
      kernel: its filters.
      index: the colour index of each.
      means: of the index over each half.
      difference: of the means.
      chance: what random divisions of the same filters differ by, on average.
      p: how often they differ as much.
    """

    kernel: Float32[np.ndarray, "kh kw 3 n"]
    index: Float32[np.ndarray, " n"]
    means: Float32[np.ndarray, " 2"]
    difference: float
    chance: float
    p: float


Run = tuple[str, int]  # a network and a seed
Layers = Mapping[Run, Halves]


def measure(task: Task) -> Measurement:
    """Train what is not trained yet, compare the halves, and draw them."""
    training, source = PRESETS[task.preset], task.options["source"]
    settings = {"source": source, **dataclasses.asdict(training)}
    runs = [(network, seed) for network in NETWORKS for seed in range(task.seeds)]
    left = [run for run in runs if task.finished(_name(run), settings) is None]
    total_steps = max(1, len(left)) * training.steps
    with contextlib.closing(Display(total_steps, training.batch_size)) as display:
        display.say(f"C9: {len(left)} of {len(runs)} networks to train on {source}")
        images = _open(source) if left else {}
        learners = {name: _Learner(name, training, images, task, display) for name in NETWORKS}
        parts = {}
        for run in runs:
            network, seed = run
            done = training.steps * len([each for each in left if each in parts])
            learn = functools.partial(learners[network].learn, seed, done)
            parts[run] = task.part(_name(run), settings, learn)
    trained = {run: compare_halves(part.arrays["trained"]) for run, part in parts.items()}
    initial = {run: compare_halves(part.arrays["initial"]) for run, part in parts.items()}
    _draw_filters(trained, task.folder / "filters.png")
    _draw_indices(initial, trained, task.folder / "index.png")
    accuracies = {run: part.values["test_accuracy"] for run, part in parts.items()}
    return Measurement(
        measured=in_words(initial, trained, accuracies),
        holds="yes" if holds(trained) else "no",
        figures=("filters.png", "index.png"),
    )


def compare_halves(kernel: Float32[np.ndarray, "kh kw 3 n"]) -> Halves:
    """Return the colour index of a first layer's filters, half against half."""
    index, means, found = jax.device_get(_compare(jnp.asarray(kernel)))
    return Halves(
        kernel=kernel,
        index=index,
        means=means,
        difference=float(found.difference),
        chance=float(found.chance),
        p=float(found.p),
    )


def holds(trained: Layers) -> bool:
    """Whether the towers of the split are specialised, and the control's halves are not."""
    share = {}
    for network in NETWORKS:
        ps = np.array([each.p for each in _of(network, trained)])
        share[network] = np.mean(ps < _SIGNIFICANT)
    difference = np.mean([each.difference for each in _of("alexnet", trained)])
    split, control = share["alexnet"], share["alexnet_one_tower"]
    return bool(split > 0.5 and control <= 0.5 and difference >= _LARGE)


def in_words(initial: Layers, trained: Layers, accuracies: Mapping[Run, float]) -> str:
    """Return the numbers of both networks in a sentence each, spread over seeds as ±."""
    sentences = []
    for network, name in NETWORKS.items():
        halves = _of(network, trained)
        low, high = np.sort([each.means for each in halves], axis=1).T
        low_p = sum(each.p < _SIGNIFICANT for each in halves)
        sentences.append(
            f"{name}: mean colour index {_spread(low)} and {_spread(high)}, apart by "
            f"{_spread([each.difference for each in halves])} "
            f"(at the start {_spread([each.difference for each in _of(network, initial)])}, "
            f"random divisions {_spread([each.chance for each in halves])}), p < {_SIGNIFICANT} "
            f"in {low_p} of {len(halves)} seeds, test accuracy "
            f"{_spread([each for run, each in accuracies.items() if run[0] == network])}"
        )
    return "; ".join(sentences)


class _Learner:
    """One network, compiled once and trained from several seeds."""

    def __init__(
        self,
        name: str,
        training: Training,
        images: Mapping[str, Source],
        task: Task,
        display: Display,
    ) -> None:
        """Note what to do; nothing is made or compiled yet."""
        self._name, self._training, self._images = name, training, images
        self._task, self._display = task, display

    def learn(self, seed: int, done: int) -> tuple[dict[str, Any], Arrays]:
        """Train from one seed; return its test accuracy, and the first layer before and after.

        Args:
          seed: of the parameters, and of the order of the images.
          done: steps made before, of those that the display counts.

        Raises:
          ConfigError: the network cannot take the images.
          RunError: the loss is not finite.
          StoppedError: a signal asked for an end.
        """
        train_step, eval_step = self._steps
        state, length = self._state(seed), self._training.steps
        initial = _first_layer(state)
        started, loss = time.perf_counter(), float("nan")
        with contextlib.closing(self._data("train", seed).iterator()) as batches:
            for step in range(1, length + 1):
                state, metrics = train_step(state, next(batches))
                if step % _SHOW_EVERY == 0 or step == length:
                    self._task.check_stop()
                    loss = float(metrics["loss"])
                    rate = step * self._training.batch_size / (time.perf_counter() - started)
                    self._display.show(done + step, loss, rate)
        if not np.isfinite(loss):
            raise RunError(f"{self._name}, seed {seed}: the loss is {loss}")
        accuracy = self._accuracy(eval_step, state)
        self._display.say(f"{NETWORKS[self._name]}, seed {seed}: test accuracy {accuracy:.3f}")
        arrays = {"initial": initial, "trained": _first_layer(state)}
        return {"test_accuracy": accuracy, "loss": loss}, arrays

    @functools.cached_property
    def _steps(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        model, optimiser = self._network
        key = jax.random.key(0)  # of dropout, which there is none of: all seeds share a program
        train_step = make_train_step(model, optimiser, key=key, mean=_MEAN, std=_STD)
        try:
            state = self._state(0)
        except ValueError as error:
            raise ConfigError(f"{self._name} on these images: {one_line(error)}") from error
        compiled = train_step.lower(state, self._data("train").batch(0)).compile()
        return compiled, make_eval_step(model, mean=_MEAN, std=_STD)

    @functools.cached_property
    def _network(self) -> tuple[nn.Module, optax.GradientTransformation]:
        training = self._training
        fields = {name: getattr(training, name) for name in _FIELDS}
        model = create_model(
            self._name, num_classes=self._images["train"].num_classes, dropout=0.0, **fields
        )
        config = OptimiserConfig(
            name="adamw",
            learning_rate=training.learning_rate,
            weight_decay=training.weight_decay,
        )
        cosine = ScheduleConfig(name="cosine", warmup=0.1)
        schedule = make_schedule(cosine, config.learning_rate, training.steps)
        return model, make_optimiser(config, schedule)

    def _state(self, seed: int) -> TrainState:
        shape = self._data("train").image_shape
        state = create_state(*self._network, jax.random.key(seed), shape)
        first = state.params["conv1"]
        kernel = first["kernel"] * (self._training.first_stddev / self._training.kernel_stddev)
        return dataclasses.replace(
            state, params={**state.params, "conv1": {**first, "kernel": kernel}}
        )

    def _data(self, split: str, seed: int = 0) -> Dataset:
        train = split == "train"
        return make_dataset(
            self._images[split],
            batch_size=self._training.batch_size if train else _TEST_BATCH_SIZE,
            seed=seed,
            augmentation=Augmentation(flip=True),
            train=train,
        )

    def _accuracy(self, eval_step: Callable[..., Any], state: TrainState) -> float:
        with contextlib.closing(self._data("test").iterator()) as batches:
            sums = jax.device_get([eval_step(state, batch) for batch in batches])
        return sum(int(each["correct"]) for each in sums) / sum(int(each["count"]) for each in sums)


@jax.jit
def _compare(
    kernel: Float32[Array, "kh kw 3 n"],
) -> tuple[Float32[Array, " n"], Float32[Array, " 2"], Specialisation]:
    index = colour_index(kernel)
    return index, tower_means(index), specialisation(index, jax.random.key(0))


def _name(run: Run) -> str:
    network, seed = run
    return f"{network}-seed{seed}"


def _open(source: str) -> dict[str, Source]:
    images = {}
    for split in ("train", "test"):
        try:
            images[split] = load_source(source, split)
        except ValueError as error:
            raise ConfigError(f"--source={source}: {error}") from error
        shape = images[split].image_shape
        if shape is None or shape[2] != 3:
            raise ConfigError(
                f"--source={source}: images of {shape} must be of one size, in colour"
            )
    return images


def _of(network: str, layers: Layers) -> list[Halves]:
    return [each for run, each in layers.items() if run[0] == network]


def _first_layer(state: TrainState) -> Float32[np.ndarray, "kh kw 3 n"]:
    return np.array(state.params["conv1"]["kernel"])  # a copy: the step consumes the state


def _spread(values: Any) -> str:
    return f"{np.mean(values):.2f} ± {np.std(values):.2f}"


def _draw_filters(layers: Layers, path: Path) -> None:
    """Draw all filters, one half a row, from grey to coloured; zero is grey."""
    names, rows = [], []
    for (network, seed), layer in layers.items():
        for half, name in enumerate("AB"):
            names.append(f"{NETWORKS[network]}, seed {seed}, {name}: index {layer.means[half]:.2f}")
            count = len(layer.index) // 2
            order = half * count + np.argsort(layer.index[half * count :][:count])
            rows.append(np.concatenate([_tile(layer.kernel[..., each]) for each in order], axis=1))
    height, width, _ = rows[0].shape
    figure = Figure(figsize=(3 + width / 30, 1 + len(rows) * height / 30), layout="constrained")
    axes = figure.subplots()
    axes.imshow(np.concatenate(rows), interpolation="nearest")
    axes.set_yticks(height * (np.arange(len(rows)) + 0.5) - 0.5, names, fontsize=8)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title("The first layer's filters,\nfrom blind to colour to blind to brightness")
    with writing(path):
        figure.savefig(path, dpi=120, bbox_inches="tight")  # with the names, whatever they take


def _tile(kernel: Float32[np.ndarray, "kh kw 3"]) -> Float32[np.ndarray, "h w 3"]:
    largest = np.abs(kernel).max() or 1.0
    return np.pad(0.5 + 0.5 * kernel / largest, ((1, 1), (1, 1), (0, 0)), constant_values=1.0)


def _draw_indices(initial: Layers, trained: Layers, path: Path) -> None:
    """Draw the colour index of all filters, seed by seed, before and after training."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    grid = figure.subplots(len(NETWORKS), 2, sharey=True, squeeze=False)
    for row, (network, name) in zip(grid, NETWORKS.items(), strict=True):
        for axes, layers, when in zip(
            row, (initial, trained), ("at the start", "trained"), strict=True
        ):
            _draw_index(axes, _of(network, layers))
            axes.set_title(f"{name}, {when}")
    for axes in grid[:, 0]:
        axes.set_ylabel("colour index")
    for axes in grid[-1]:
        axes.set_xlabel("seed: half A, half B (bars are means)")
    with writing(path):
        figure.savefig(path, dpi=120)


def _draw_index(axes: Axes, layers: list[Halves]) -> None:
    for seed, layer in enumerate(layers):
        for half, (values, colour) in enumerate(
            zip(np.split(layer.index, 2), ("tab:blue", "tab:orange"), strict=True)
        ):
            place = seed + (half - 0.5) * 0.4
            spread = np.linspace(-0.12, 0.12, len(values))
            axes.plot(place + spread, values, ".", color=colour, markersize=4, alpha=0.6)
            axes.plot([place - 0.18, place + 0.18], 2 * [layer.means[half]], color=colour, lw=3)
        axes.text(seed, 1.03, f"p = {layer.p:.2g}", ha="center", fontsize=8)
    axes.axhline(2 / 3, color="grey", lw=0.8, ls=":")
    axes.set(ylim=(-0.03, 1.12), xticks=range(len(layers)))


CLAIM = Claim(
    name="C9",
    script="c09_towers",
    title="without exchange in layers 1 and 2, the towers specialise",
    expected="in every run one tower's filters are largely blind to colour, the other's largely "
    "specific to it",
    measure=measure,
    seeds=5,
    options={"source": "colour_patches"},
)

if __name__ == "__main__":
    sys.exit(main(CLAIM, __doc__))
