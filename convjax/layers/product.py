"""A name for what products put out, by which a stack remembers it for the backward pass."""

from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

PRODUCT = "product"


def product(y: Array) -> Array:
    """y, remembered by `stack(remat="products")`."""
    return checkpoint_name(y, PRODUCT)
