"""A new last layer on a trained network."""

import jax
import numpy as np
from jaxtyping import Array, Float, PyTree

from convjax.models.network import Network


def replace_head(
    model: Network,
    variables: PyTree,
    key: Array,
    images: Float[Array, "b h w c"] | jax.ShapeDtypeStruct,
) -> PyTree:
    """The variables for `model`, with a new last layer and all else as it is in `variables`.

        variables = ...                                            # of 1,000 classes, trained
        model = create_model("resnet50", num_classes=10)
        variables = replace_head(model, variables, key, images)

    Auxiliary heads, which only training calls, are new too.

    Args:
      model: with the number of classes that is wanted; 0 leaves the layer out.
      variables: of the same network with any number of classes.
      key: of the new layer's parameters.
      images: [b, h, w, c], or their shape.

    Raises:
      ValueError: the variables are another network's; the message names what does not fit.
    """
    new = model.init_parts(key, images, (model.head, *model.training_only))
    unfit = []
    for collection, parts in new.items():
        for name in parts.keys() - {model.head, *model.training_only}:
            old = variables.get(collection, {}).get(name)
            if jax.tree.map(np.shape, old) != jax.tree.map(np.shape, parts[name]):
                unfit.append(f"{collection}/{name}")
            parts[name] = old
    if unfit:
        raise ValueError(f"these are not the model's variables: {', '.join(sorted(unfit))}")
    return new
