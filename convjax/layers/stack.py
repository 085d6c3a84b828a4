"""Equal layers one after another, as one layer under a scan.

    x = stack(Block(features=64, name="conv2_x"), depth, x, train)

The parameters of all lie under the one layer's name, stacked along a new first axis, and the
program holds the layer once: a thousand layers compile about as fast as ten. Parameters, batch
statistics and intermediates are stacked; what a layer sows into other collections is lost.
"""

from typing import Any, Literal

import jax
from flax import linen as nn
from jaxtyping import Array, Float

from convjax.layers.initialisers import declaring, is_declaring
from convjax.layers.product import PRODUCT

Remat = Literal["none", "products", "all"]
"""What the backward pass of a stack computes again instead of remembering it: nothing, all but what
convolutions, dense layers and attention put out, or all but each layer's input."""


def stack(
    layer: nn.Module,
    depth: int,
    x: Float[Array, "..."],
    train: bool,
    *,
    remat: Remat = "none",
    per_layer: Array | None = None,
) -> Float[Array, "..."]:
    """`depth` copies of `layer`, each called as layer(x, train) on what the one before gave.

    Args:
      layer: a module of the calling one, with a name; what it gives has the shape of x.
      depth: the number of copies.
      x: what the first one gets.
      train: passed on.
      remat: what is computed again in the backward pass.
      per_layer: values [depth, ...], of which each copy gets its own as a third argument.
    """
    axes: dict[Any, Any] = {"params": 0, "batch_stats": 0, "intermediates": 0}

    def call(layer: nn.Module, x: Array, own: Array | None) -> tuple[Array, None]:
        return (layer(x, train) if own is None else layer(x, train, own)), None

    if is_declaring():
        with declaring(copies=depth):
            call(layer, x, None if per_layer is None else per_layer[0])
        return x
    if remat != "none":
        products = jax.checkpoint_policies.save_only_these_names(PRODUCT)
        policy = products if remat == "products" else None
        call = nn.remat(call, policy=policy, prevent_cse=False)
    scan = nn.scan(
        call,
        variable_axes=axes,
        split_rngs={"params": True, "dropout": True},
        length=depth,
    )
    return scan(layer, x, per_layer)[0]
