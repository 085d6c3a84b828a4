"""Do the towers of a network specialise in colour? Measures of first-layer filters.

Krizhevsky, Sutskever and Hinton (2012, section 6.1) saw that the filters on one GPU were largely
colour-agnostic, those on the other largely colour-specific, in every run. Flachot and Gegenfurtner
(Processing of chromatic information in a deep convolutional neural network, JOSA A 35, 2018) took
the same network's filters apart along the achromatic axis R = G = B and the plane across it. So do
these functions:

    index = colour_index(params["conv1"]["kernel"])  # 0 is blind to colour, 1 to everything else
    tower_means(index)                               # of each tower
    specialisation(index, key)                       # their difference, and chance's

A filter is meant in the axes of the pixels. Where channels were divided by unlike deviations before
the network saw them, divide the kernel by those first.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

_SAME = 1e-6  # of the largest value: what rounding in float32 could have made of a difference


class Specialisation(NamedTuple):
    """How unlike the towers' mean indices are, beside random divisions of the same filters.

    Attributes:
      difference: the largest mean less the smallest, in the index's unit.
      chance: the mean difference of random divisions into towers of the same sizes.
      z: how many standard deviations of random divisions `difference` lies above `chance`; 0 where
        all filters are alike.
      p: share of random divisions, with the towers' own among them, that differ at least as much:
        the one-sided p-value of a permutation test.
    """

    difference: Float[Array, ""]
    chance: Float[Array, ""]
    z: Float[Array, ""]
    p: Float[Array, ""]


@jax.jit
def colour_index(kernel: Float[Array, "kh kw 3 n"]) -> Float[Array, " n"]:
    """The share of each filter's energy that is chromatic, in [0, 1].

    With ḡ the mean of a filter w over its three channels, the index is 1 - 3 Σ ḡ² / Σ w²: what is
    left of w² when its projection on R = G = B is taken away at each pixel. 0 is a filter that
    treats all channels alike, and sees no colour; 1 one whose channels sum to zero at each pixel,
    and sees no brightness. One channel alone, and independent noise on average, have 2/3, and two
    equal channels 1/3. A filter of zeros has 0.

    Args:
      kernel: of the first layer, HWIO, on red, green and blue.
    """
    peak = jnp.abs(kernel).max((0, 1, 2), keepdims=True)
    scaled = kernel / jnp.where(peak > 0, peak, 1)  # squares that neither under- nor overflow
    grey = scaled.mean(2, keepdims=True)
    colour_energy = jnp.square(scaled - grey).sum((0, 1, 2))
    grey_energy = 3 * jnp.square(grey).sum((0, 1, 2))
    return colour_energy / jnp.where(peak.ravel() > 0, colour_energy + grey_energy, 1)


def tower_means(values: Float[Array, " n"], *, towers: int = 2) -> Float[Array, " towers"]:
    """The mean of a value over the filters of each tower, which follow one another.

    Raises:
      ValueError: `towers` does not divide the number of filters.
    """
    if towers < 1 or len(values) % towers:
        raise ValueError(f"{towers=} must divide {len(values)} filters")
    return jnp.mean(values.reshape(towers, -1), axis=1)


@partial(jax.jit, static_argnames=("towers", "draws"))
def specialisation(
    values: Float[Array, " n"], key: Key[Array, ""], *, towers: int = 2, draws: int = 10_000
) -> Specialisation:
    """Compare the towers' means of a value with those of random divisions of the same filters.

    Args:
      values: of each filter, tower after tower; the colour index, for one.
      key: of the random divisions.
      towers: equal parts of the filters.
      draws: random divisions.

    Raises:
      ValueError: there are not two or more towers, or they do not divide the filters, or there are
        no draws.
    """
    if towers < 2:
        raise ValueError(f"{towers=} must be at least 2 to be compared")
    if draws < 1:
        raise ValueError(f"{draws=} must be at least 1")

    def spread(values: Float[Array, " n"]) -> Float[Array, ""]:
        means = tower_means(values, towers=towers)
        return means.max() - means.min()

    difference = spread(values)
    orders = jnp.argsort(jax.random.uniform(key, (draws, len(values))), axis=1)
    random = jax.vmap(spread)(values[orders])
    chance, deviation = random.mean(), random.std()
    same = _SAME * jnp.abs(values).max()
    alike = deviation <= same
    return Specialisation(
        difference=difference,
        chance=chance,
        z=jnp.where(alike, 0, (difference - chance) / jnp.where(alike, 1, deviation)),
        p=(1 + jnp.sum(random >= difference - same)) / (1 + draws),
    )
