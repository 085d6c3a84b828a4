"""What follows a product before it is written: activation(accumulator + bias + residual).

All of it is float32 (float64 for float64 operands); one cast at the end. A kernel that holds the
accumulator in registers applies this to its block; the XLA path hands it to XLA, which fuses it.

Kept for the backward pass by XLA: for relu one byte an element (which of them were positive), for
the smooth activations their float32 argument, from which they are computed again. By the kernels:
for relu the result itself, for the smooth ones their argument, both in the result's dtype.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
"""`gelu` is x Φ(x) by the error function; `gelu_tanh` is the same paper's approximation of it.
Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415."""


def _erf(x: Array) -> Array:
    """erf by a formula whose error is below 2e-7: Triton's lowering of Pallas has none.

    Abramowitz and Stegun, "Handbook of Mathematical Functions", 7.1.26.
    """
    t = 1 / (1 + 0.3275911 * jnp.abs(x))
    series = 1.061405429
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = series * t + coefficient
    return jnp.sign(x) * (1 - series * t * jnp.exp(-x * x))


def _gelu(x: Array) -> Array:
    return 0.5 * x * (1 + _erf(x * 0.5**0.5))


_IN_KERNELS: dict[str, Callable[[Array], Array]] = {
    "relu": lambda x: jnp.maximum(x, 0),
    "gelu": _gelu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": lambda x: x / (1 + jnp.exp(-x)),
}

_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": jax.checkpoint(partial(jax.nn.gelu, approximate=False)),
    "gelu_tanh": jax.checkpoint(partial(jax.nn.gelu, approximate=True)),
    "silu": jax.checkpoint(jax.nn.silu),
}


def check_floating(**operands: Array) -> None:
    """Refuses, before any work, operands whose products would be rounded to floats.

    Raises:
      TypeError: the dtype of one of them is not floating.
    """
    for name, operand in operands.items():
        if not hasattr(operand, "dtype"):
            raise TypeError(f"{name} of type {type(operand).__name__} must be an array")
        if not jnp.issubdtype(operand.dtype, jnp.floating):
            raise TypeError(f"{name} of dtype {operand.dtype} must be floating")


def check(
    shape: tuple[int, ...],
    *,
    bias: Array | None,
    residual: Array | None,
    activation: str | None,
    channel_axis: int = -1,
) -> None:
    """Refuses, before any work, an epilogue that does not fit an output of `shape`.

    Raises:
      ValueError: `bias` is not [channels], `residual` not of `shape`, or `activation` unknown.
    """
    for name, term in (("bias", bias), ("residual", residual)):
        if term is not None and not hasattr(term, "shape"):
            raise TypeError(f"{name} of type {type(term).__name__} must be an array")
    channels = shape[channel_axis]
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"bias of shape {bias.shape} must be ({channels},), one for each channel")
    if residual is not None and residual.shape != shape:
        raise ValueError(f"residual of shape {residual.shape} must have the output's shape {shape}")
    if activation is not None and activation not in _FUNCTIONS:
        names = ", ".join(map(repr, get_args(Activation)))
        raise ValueError(f"activation={activation!r} must be None or one of {names}")


def apply(
    accumulator: Float[Array, "..."],
    *,
    bias: Float[Array, " channels"] | None,
    residual: Float[Array, "..."] | None,
    activation: Activation | None,
    out_dtype: DTypeLike,
    channel_axis: int = -1,
) -> Float[Array, "..."]:
    """activation(accumulator + bias + residual) in the accumulator's dtype, then cast."""
    y = accumulator
    if bias is not None:
        others = [axis for axis in range(y.ndim) if axis != channel_axis % y.ndim]
        y = y + jnp.expand_dims(bias, others).astype(y.dtype)
    if residual is not None:
        y = y + residual.astype(y.dtype)
    if activation is not None:
        y = _FUNCTIONS[activation](y)
    return y.astype(out_dtype)


def apply_in_kernel(
    accumulator: Float[Array, "m n"],
    *,
    bias: Float[Array, "_ _"] | None,
    residual: Float[Array, "m n"] | None,
    activation: Activation | None,
) -> tuple[Float[Array, "m n"], Float[Array, "m n"]]:
    """(activation(accumulator + bias + residual), the activation's argument) of a kernel's tile."""
    z = accumulator
    for term in (bias, residual):
        if term is not None:
            z = z + term.astype(z.dtype)
    return (z if activation is None else _IN_KERNELS[activation](z)), z


def keeps_argument(activation: Activation | None) -> bool:
    """Whether the backward pass needs the activation's argument: relu finds all in its result."""
    return activation not in (None, "relu")


def crowds(activation: Activation | None, *, added: bool, keeps: bool) -> bool:
    """Whether the epilogue holds so many numbers an element that a large tile spills registers.

    The exact gelu does; tanh and exp do beside a residual, or beside their argument if it is kept.
    """
    return activation == "gelu" or (keeps_argument(activation) and (added or keeps))


def transpose(
    gradient: Float[Array, "..."], kept: Float[Array, "..."] | None, activation: Activation | None
) -> Float[Array, "..."]:
    """The gradient of the activation's argument, float32, from that of its result.

    `kept` is the argument where `keeps_argument`, else the result.
    """
    gradient = gradient.astype(jnp.float32)
    if activation is None or kept is None:
        return gradient
    if activation == "relu":
        return jnp.where(kept > 0, gradient, 0)
    _, pull = jax.vjp(_FUNCTIONS[activation], kept.astype(jnp.float32))
    return pull(gradient)[0]
