"""Vision networks as pure Flax modules, for research in JAX.

    import convjax
    model = convjax.create_model("resnet50")
    variables = model.init(jax.random.key(0), images)       # images [b, h, w, c], float
    logits = model.apply(variables, images, train=False)    # [b, num_classes]

Rooms: `convjax.layers` (Linen modules over `pallas_kernels`), `convjax.models` (one paper a file),
`convjax.data`, `convjax.training`. Importing this package touches no device, file or network.
"""

from convjax.models import create_model, list_models, replace_head
from convjax.weights import load_weights, save_weights

__all__ = ["create_model", "list_models", "load_weights", "replace_head", "save_weights"]
__version__ = "0.1.0"
