"""Matrix product with a fused epilogue: y = activation(a b + bias + residual).

FLOPs: 2 m n k. Bytes at best: a, b, bias and residual read once and y written once; the epilogue
adds no pass over y. Low precision is accumulated in float32. Kept for the backward pass: a, b and
what `epilogue` keeps. The gradients are two products in the operands' own dtype,
da = dy bᵀ and db = aᵀ dy, so bfloat16 training stays on bfloat16 matrix units.
"""

from functools import partial, reduce
from operator import add

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import epilogue, launch
from pallas_kernels.epilogue import Activation
from pallas_kernels.launch import Backend


def reference(
    a: Float[Array, "*batch m k"],
    b: Float[Array, "... k n"],
    *,
    bias: Float[Array, " n"] | None = None,
    residual: Float[Array, "*batch m n"] | None = None,
    activation: Activation | None = None,
) -> Float[Array, "*batch m n"]:
    """The equation in float32 at the highest precision: what every backend is measured against."""
    product = jnp.matmul(
        a.astype(jnp.float32), b.astype(jnp.float32), precision=lax.Precision.HIGHEST
    )
    return epilogue.apply(
        product, bias=bias, residual=residual, activation=activation, out_dtype=jnp.float32
    )


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _product(a: Array, b: Array, precision: lax.PrecisionLike) -> Array:
    """a b, accumulated and returned in float32, or in float64 for float64."""
    accumulator = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.matmul(a, b, precision=precision, preferred_element_type=accumulator)


@partial(_product.defjvp, symbolic_zeros=True)
def _product_jvp(precision, primals, tangents):
    # Without this rule the transposed products would mix float32 cotangents with bfloat16 operands.
    (a, b), (da, db) = primals, tangents
    y = _product(a, b, precision)
    terms = []
    if not isinstance(da, SymbolicZero):
        terms.append(jnp.matmul(da, b, precision=precision))
    if not isinstance(db, SymbolicZero):
        terms.append(jnp.matmul(a, db, precision=precision))
    return y, reduce(add, terms).astype(y.dtype)


def matmul(
    a: Float[Array, "*batch m k"],
    b: Float[Array, "... k n"],
    *,
    bias: Float[Array, " n"] | None = None,
    residual: Float[Array, "*batch m n"] | None = None,
    activation: Activation | None = None,
    out_dtype: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    backend: Backend = "auto",
    blocks: None = None,
) -> Float[Array, "*batch m n"]:
    """activation(a b + bias + residual).

    Args:
      a: the left matrix, or a batch of them.
      b: the right matrix [k, n], shared by the batch, or one for each of it [*batch, k, n].
      bias: one number for each column.
      residual: added to the product before the activation.
      activation: applied in float32.
      out_dtype: the result's; by default the common dtype of a and b.
      precision: of the products, as in `jax.lax.dot_general`.
      backend: "xla", or "auto".
      blocks: block sizes, for backends that have blocks.

    Raises:
      TypeError: a or b is not floating.
      ValueError: the shapes do not fit, or a name or `blocks` is refused.
      NotImplementedError: the backend is not there yet.
    """
    launch.resolve("matmul", backend, available=("xla",), blocks=blocks)
    epilogue.check_floating(a=a, b=b)
    _check_operands(a, b)
    dtype = jnp.promote_types(a.dtype, b.dtype)
    shape = (*a.shape[:-1], b.shape[-1])
    epilogue.check(shape, bias=bias, residual=residual, activation=activation)
    return epilogue.apply(
        _product(a.astype(dtype), b.astype(dtype), precision),
        bias=bias,
        residual=residual,
        activation=activation,
        out_dtype=out_dtype or dtype,
    )


def _check_operands(a: Array, b: Array) -> None:
    if a.ndim < 2 or b.ndim not in (2, a.ndim) or (b.ndim > 2 and b.shape[:-2] != a.shape[:-2]):
        raise ValueError(
            f"b of shape {b.shape} must be one matrix, or one for each of a's, of shape {a.shape}"
        )
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"a has k={a.shape[-1]} columns but b has k={b.shape[-2]} rows")
