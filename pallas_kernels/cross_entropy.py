"""Cross-entropy of a softmax with integer labels and label smoothing, one loss an example.

loss = log Σ exp(logits) - Σ target · logits,  target = (1 - ε) onehot(label) + ε / n

(Szegedy et al., "Rethinking the Inception Architecture", arXiv:1512.00567, section 7; the same ε as
`torch.nn.functional.cross_entropy`'s.) Softmax, target and both sums are one pass over the logits;
no one-hot array and no gather, so classes may be split over devices. Arithmetic is float32.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer

from pallas_kernels import launch
from pallas_kernels.launch import Backend


def reference(
    logits: Float[Array, "*batch n"], labels: Integer[Array, "*batch"], label_smoothing: float
) -> Float[Array, "*batch"]:
    """The equation in plain jnp, which is also the XLA backend."""
    logits = logits.astype(jnp.float32)
    classes = logits.shape[-1]
    # Wide enough for `classes`, which a uint8 may not be.
    labels = labels.astype(jnp.promote_types(labels.dtype, jnp.int32))
    class_of = lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    at_label = jnp.sum(jnp.where(class_of == labels[..., None], logits, 0), axis=-1)
    loss = jax.nn.logsumexp(logits, axis=-1) - (1 - label_smoothing) * at_label
    if label_smoothing:
        loss = loss - label_smoothing * jnp.mean(logits, axis=-1)
    return jnp.where((labels >= 0) & (labels < classes), loss, jnp.nan)


def cross_entropy(
    logits: Float[Array, "*batch n"],
    labels: Integer[Array, "*batch"],
    *,
    label_smoothing: float = 0.0,
    backend: Backend = "auto",
) -> Float[Array, "*batch"]:
    """-Σ target log softmax(logits) for every example, in nats and float32.

    A label outside [0, n) gives a loss of NaN: labels are not known while tracing, so they cannot
    raise, and a number would be learned from.

    Args:
      logits: unnormalised log-probabilities of n classes.
      labels: the index of each example's class.
      label_smoothing: ε, the share of the target spread evenly over all n classes, in [0, 1).
      backend: "xla", or "auto".

    Raises:
      ValueError: the shapes do not fit, `label_smoothing` is not in [0, 1), or `backend` is
        unknown.
      NotImplementedError: the backend is not there yet.
    """
    launch.resolve("cross_entropy", backend, available=("xla",))
    if logits.ndim < 1 or logits.shape[:-1] != labels.shape:
        raise ValueError(f"labels of shape {labels.shape} must be one for each of {logits.shape}")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"labels of dtype {labels.dtype} must be integers")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing={label_smoothing} must be in [0, 1)")
    return reference(logits, labels, label_smoothing)
