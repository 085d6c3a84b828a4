"""One update and one measurement: pure functions of state and batch, compiled once a run."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float32, Int32, Key, PyTree, UInt8

from convjax.data import Batch, normalise
from convjax.training.state import Trainable, TrainState
from pallas_kernels import Backend, cross_entropy


class StepMetrics(TypedDict):
    """What one update saw, before it.

    Attributes:
      loss: mean over the batch, label smoothing included, without that of auxiliary heads.
      accuracy: share of the batch whose largest logit is the label's.
      gradient_norm: Euclidean, over all parameters, before clipping, of all that is minimised.
    """

    loss: Float32[Array, ""]
    accuracy: Float32[Array, ""]
    gradient_norm: Float32[Array, ""]


class EvalSums(TypedDict):
    """What one batch adds to a measurement; sums, so that padded batches stay exact.

    Attributes:
      loss: summed cross-entropy, without label smoothing.
      correct: images whose largest logit is the label's.
      count: images, without the padding.
      prediction: the largest logit's class, of each row.
    """

    loss: Float32[Array, ""]
    correct: Int32[Array, ""]
    count: Int32[Array, ""]
    prediction: Int32[Array, " b"]


TrainStep = Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]
EvalStep = Callable[[TrainState, Batch], EvalSums]


def make_train_step(
    model: Trainable,
    optimiser: optax.GradientTransformation,
    *,
    key: Key[Array, ""],
    mean: Sequence[float],
    std: Sequence[float],
    label_smoothing: float = 0.0,
    auxiliary_weight: float = 0.3,
    backend: Backend = "auto",
    used: Callable[[PyTree], PyTree] = lambda params: params,
    out_shardings: Any = None,
) -> jax.stages.Wrapped:
    """Return the jitted `TrainStep`; it consumes the state that it is given.

    Args:
      model: called with `train=True`, mutable `batch_stats` and an rng `dropout`.
      optimiser: made by `make_optimiser`.
      key: of dropout; step `n` uses it folded with `n`.
      mean: as `convjax.data.normalise` takes it.
      std: as `convjax.data.normalise` takes it.
      label_smoothing: share of a label's probability that is spread over all classes.
      auxiliary_weight: of the losses of auxiliary heads, whose logits the model sows into the
        collection "auxiliary_logits", as GoogLeNet does.
      backend: what computes the cross-entropy.
      used: parameters as the network uses them, of parameters as they lie on a mesh.
      out_shardings: of the new state and of the metrics; None leaves them to XLA.
    """
    smoothed = functools.partial(cross_entropy, label_smoothing=label_smoothing, backend=backend)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        pixels, labels, mask = _traced(batch)
        images = normalise(pixels, mean, std)
        dropout_key = jax.random.fold_in(key, state.step)

        def loss_fn(params):
            logits, updates = model.apply(
                {"params": used(params), "batch_stats": state.batch_stats},
                images,
                train=True,
                mutable=["batch_stats", "auxiliary_logits"],
                rngs={"dropout": dropout_key},
            )
            loss = _masked_mean(smoothed(logits, labels), mask)
            total = loss
            for head in jax.tree.leaves(updates.get("auxiliary_logits", {})):
                total += auxiliary_weight * _masked_mean(smoothed(head, labels), mask)
            return total, (loss, logits, updates.get("batch_stats", {}))

        gradient_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (_, (loss, logits, batch_stats)), gradients = gradient_fn(state.params)
        updates, opt_state = optimiser.update(gradients, state.opt_state, state.params)
        new_state = TrainState(
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            batch_stats=batch_stats,
            opt_state=opt_state,
        )
        hits = (logits.argmax(-1) == labels).astype(jnp.float32)
        metrics = StepMetrics(
            loss=loss,
            accuracy=_masked_mean(hits, mask),
            gradient_norm=optax.tree.norm(gradients),
        )
        return new_state, metrics

    return jax.jit(train_step, donate_argnums=0, out_shardings=out_shardings)


def make_eval_step(
    model: Trainable,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    backend: Backend = "auto",
    used: Callable[[PyTree], PyTree] = lambda params: params,
    out_shardings: Any = None,
) -> jax.stages.Wrapped:
    """Return the jitted `EvalStep`; arguments are those of `make_train_step`."""

    def eval_step(state: TrainState, batch: Batch) -> EvalSums:
        pixels, labels, mask = _traced(batch)
        images = normalise(pixels, mean, std)
        variables = {"params": used(state.params), "batch_stats": state.batch_stats}
        logits = cast(Array, model.apply(variables, images, train=False))
        losses = cross_entropy(logits, labels, backend=backend)
        prediction = logits.argmax(-1).astype(jnp.int32)
        return EvalSums(
            loss=jnp.sum(losses, where=mask),
            correct=jnp.sum((prediction == labels) & mask, dtype=jnp.int32),
            count=jnp.sum(mask, dtype=jnp.int32),
            prediction=prediction,
        )

    return jax.jit(eval_step, out_shardings=out_shardings)


def _traced(
    batch: Batch,
) -> tuple[UInt8[Array, "b h w c"], Int32[Array, " b"], Bool[Array, " b"]]:
    return jnp.asarray(batch["image"]), jnp.asarray(batch["label"]), jnp.asarray(batch["mask"])


def _masked_mean(values: Float32[Array, " b"], mask: Bool[Array, " b"]) -> Float32[Array, ""]:
    """Average the rows in `mask`; a batch has at least one."""
    return jnp.mean(values, where=mask)
