"""Response normalisation over pixels; along channels it is `pallas_kernels.local_response_norm`."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def pixel_response_norm(
    x: Float[Array, "b h w c"], *, size: int = 5, alpha: float = 1e-3, beta: float = 0.75
) -> Float[Array, "b h w c"]:
    """x / (1 + α / size² Σ x²)^β, summed over the size × size pixels around each, by channel.

    The public source of AlexNet has it after its second layer, though the paper has not. float32
    inside, [b, h, w, c] → the same shape and dtype.
    """
    values = x.astype(jnp.float32)
    total = lax.reduce_window(
        values * values, 0.0, lax.add, (1, size, size, 1), (1, 1, 1, 1), "SAME"
    )
    return (values * (1 + alpha / size**2 * total) ** -beta).astype(x.dtype)
