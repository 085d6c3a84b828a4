"""Cross-entropy of a softmax with integer labels and label smoothing, one loss an example.

loss = log Σ exp(logits) - Σ target · logits,  target = (1 - ε) onehot(label) + ε / n

(Szegedy et al., "Rethinking the Inception Architecture", arXiv:1512.00567, section 7; the same ε as
`torch.nn.functional.cross_entropy`'s.) All logits are compared with the largest of their example,
so that a number added to all of them changes nothing. Arithmetic is float32.

FLOPs: about 5 an element in each direction; bytes set the pace. At best the logits are read once,
and backward read again and their gradient written: no array of their size is float32 unless they
are, on any backend. Kept for the backward pass: the logits, the labels, and two float32 numbers an
example, the largest logit and log Σ exp(logits - largest). XLA's way has no one-hot array and no
gather either, so classes may be split over devices. The kernels are in `cross_entropy_kernels`;
they read these fields of `Blocks`:

  n            classes at one time
  group        examples of a block of threads
  m, k, stages, splits    unused

What the compiler makes of them on sm_90 with ε = 0.1 (Triton 3.9), with "issue" as in `layer_norm`.
Rows are loaded 16 bytes a thread at a time, also where n is odd and they begin anywhere; only what
is left of such a row after its tiles is not.

                           forward                        backward, without a loop
      n           registers   loop   issue    registers   instructions   issue
    1000 bfloat16     32       328    1.64        32           240        0.60    no loop either
   21843 bfloat16     72       175    0.85        92           260        0.63    of a tile, on
   21843 float32      80       180    0.44        86           245        0.30    the average
"""

import operator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from pallas_kernels import calls, cross_entropy_kernels, epilogue, launch, selection
from pallas_kernels.blocks import Blocks, side
from pallas_kernels.launch import Backend
from pallas_kernels.matmul import MULTIPROCESSORS
from pallas_kernels.transformations import batched, partitioned, prepared, typed


def reference(
    logits: Float[Array, "*batch n"], labels: Integer[Array, "*batch"], label_smoothing: float
) -> Float[Array, "*batch"]:
    """The equation in plain jnp: what every backend is measured against."""
    return _parts(logits, labels, label_smoothing)[0]


def _parts(logits: Array, labels: Array, smoothing: float) -> tuple[Array, Array, Array]:
    """The loss, the largest logit and log Σ exp(logits - largest) of each example."""
    top = jnp.max(logits, -1, initial=-jnp.inf).astype(jnp.float32)
    top = jnp.where(jnp.isfinite(top), top, 0)  # so that infinite logits are no NaN
    below = logits.astype(jnp.float32) - top[..., None]
    terms = jnp.exp(below), jnp.where(_of_label(logits, labels), below, 0), below
    # In one reduction, which XLA fuses with all that it is of. For three of them, XLA:CPU writes
    # three arrays.
    total, at_label, *rest = lax.reduce(
        terms[: 2 + bool(smoothing)],
        (jnp.float32(0),) * (2 + bool(smoothing)),
        lambda sums, more: tuple(map(operator.add, sums, more)),
        (logits.ndim - 1,),
    )
    log_sum = jnp.log(total)
    loss = log_sum - (1 - smoothing) * at_label
    if smoothing:
        loss = loss - smoothing / max(logits.shape[-1], 1) * rest[0]
    return jnp.where(labels >= 0, loss, jnp.nan), top, log_sum


def _of_label(logits: Array, labels: Array) -> Array:
    categories = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return categories == labels[..., None]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _xla(smoothing: float, logits: Array, labels: Array, ignored: Array) -> tuple[Array, ...]:
    return _parts(logits, labels, smoothing)


@_xla.defjvp
def _xla_jvp(smoothing: float, primals, tangents):
    # Without this rule the backward pass would be given a softmax in float32.
    logits, labels, ignored = primals
    outputs = _xla(smoothing, logits, labels, ignored)
    d_loss, d_log_sum = _push(smoothing, logits, labels, ignored, *outputs[1:], tangents[0])
    return outputs, (d_loss, jnp.zeros_like(d_loss), d_log_sum)


@partial(jax.checkpoint, prevent_cse=False, static_argnums=(0,))
def _push(
    smoothing: float,
    logits: Array,
    labels: Array,
    ignored: Array,
    top: Array,
    log_sum: Array,
    d_logits: Array,
) -> tuple[Array, Array]:
    """The tangents of loss and log_sum, from what the backward pass is to keep."""
    share = jnp.exp(logits.astype(jnp.float32) - top[..., None] - log_sum[..., None])
    even = smoothing / max(logits.shape[-1], 1)
    target = jnp.where(_of_label(logits, labels), 1 - smoothing + even, even)
    lossless = (ignored | (labels < 0))[..., None]
    slope = jnp.where(lossless, 0, share - target)
    d_logits = d_logits.astype(jnp.float32)
    return jnp.sum(slope * d_logits, -1), jnp.sum(share * d_logits, -1)


@dataclass(frozen=True)
class _Problem:
    """All there is to know about a loss but its arrays."""

    smoothing: float
    backend: Backend
    blocks: Blocks | None

    def prepare(self, logits: Array) -> tuple[tuple[int, int], dict[str, Any]]:
        """logits as [rows, n], and how their kernels are launched."""
        *batch, classes = logits.shape
        rows = prod(batch)
        blocks = self.blocks or default_blocks((rows, classes), logits.dtype)
        options = {"smoothing": self.smoothing, "blocks": blocks, "backend": self.backend}
        return (rows, classes), options


def _launch(logits: Array, labels: Array, *, problem: _Problem) -> list[Array]:
    if logits.size == 0:
        return list(_parts(logits, labels, problem.smoothing))
    shape, options = problem.prepare(logits)
    outputs = cross_entropy_kernels.forward(
        logits.reshape(shape), labels.reshape(shape[0]), **options
    )
    return [output.reshape(labels.shape) for output in outputs]


def _launch_gradient(logits: Array, *of_examples: Array, problem: _Problem) -> Array:
    if logits.size == 0:
        return logits
    shape, options = problem.prepare(logits)
    examples = (each.reshape(shape[0]) for each in of_examples)
    gradient = cross_entropy_kernels.backward(logits.reshape(shape), *examples, **options)
    return gradient.reshape(logits.shape)


def _on_any_mesh(function: Any, logits: Array, *of_examples: Array, outputs: int | None) -> Any:
    """A launch under vmap and on a mesh, where examples may be split.

    Its result is `outputs` numbers an example, or, with None, an array like the logits.
    """
    batch = " ".join(f"b{axis}" for axis in range(logits.ndim - 1))
    split = partitioned(
        function,
        operands=[f"{batch} n", *[batch] * len(of_examples)],
        outputs=[f"{batch} n"] if outputs is None else [batch] * outputs,
        gathers=["n"],
    )

    def rule(size, has_axis, operands):
        moved = (
            operand if has else jnp.broadcast_to(operand, (size, *operand.shape))
            for operand, has in zip(operands, has_axis, strict=True)
        )
        return _on_any_mesh(function, *moved, outputs=outputs)

    return batched(split, rule)(logits, *of_examples)


def _compute(problem: _Problem, logits: Array, labels: Array) -> list[Array]:
    """The loss, and the two numbers an example that are for the backward pass alone."""
    return _on_any_mesh(partial(_launch, problem=problem), logits, labels, outputs=3)


_kernel = jax.custom_vjp(_compute, nondiff_argnums=(0,))


def _forward(problem: _Problem, logits: Array, labels: Array):
    # Not the launch but the function, so that a gradient has a gradient.
    outputs = _kernel(problem, logits, labels)
    return outputs, (logits, labels, *outputs[1:])


def _backward(problem: _Problem, saved, cotangents: list[Array]):
    logits, labels, *normaliser = saved
    d_loss = jnp.where(labels >= 0, cotangents[0], 0)
    return _gradient(problem, logits, labels, *normaliser, d_loss), None


def _compute_gradient(problem: _Problem, logits: Array, *of_examples: Array) -> Array:
    function = partial(_launch_gradient, problem=problem)
    return _on_any_mesh(function, logits, *of_examples, outputs=None)


_gradient = jax.custom_vjp(_compute_gradient, nondiff_argnums=(0,))


def _gradient_forward(problem: _Problem, logits: Array, *of_examples: Array):
    labels, *_, d_loss = of_examples
    return _gradient(problem, logits, *of_examples), (logits, labels, d_loss)


def _gradient_backward(problem: _Problem, saved, cotangent: Array):
    """Gradients of gradients are XLA's, of the logits themselves, of which the sums are made."""
    logits, labels, d_loss = saved

    def gradient(logits, d_loss):
        loss = partial(_xla, problem.smoothing, labels=labels, ignored=d_loss == 0)
        return jax.vjp(lambda logits: loss(logits)[0], logits)[1](d_loss)[0]

    d_logits, dd_loss = jax.vjp(gradient, logits, d_loss)[1](cotangent)
    zero = jnp.zeros_like(d_loss)
    return d_logits, None, zero, zero, dd_loss


_kernel.defvjp(_forward, _backward)
_gradient.defvjp(_gradient_forward, _gradient_backward)


def cross_entropy(
    logits: Float[Array, "*batch n"],
    labels: Integer[Array, "*batch"],
    *,
    label_smoothing: float = 0.0,
    weights: Float[Array, "*batch"] | None = None,
    backend: Backend = "auto",
    blocks: Blocks | None = None,
) -> Float[Array, "*batch"]:
    """-Σ target log softmax(logits) for every example, in nats and float32.

    A label outside [0, n) gives a loss of NaN: labels are not known while tracing, so they cannot
    raise, and a number would be learned from. Its gradient is 0.

    A weight of exactly 0 is the way to leave an example out: its loss is 0 and so is the gradient
    of its logits, whatever they and its label are, NaN and -1 too. (0 times a loss of NaN would be
    NaN.) The gradient of a weight is its example's loss; where the weight is 0 and the loss is not
    finite, it is 0.

    Args:
      logits: unnormalised log-probabilities of n classes.
      labels: the index of each example's class.
      label_smoothing: ε, the share of the target spread evenly over all n classes, in [0, 1).
      weights: what each loss is multiplied by.
      backend: "xla", differentiable in both modes; "triton", the kernels, on a GPU, in reverse mode
        only (the gradients of their gradients are XLA's); "interpret", the kernels' arithmetic on
        any hardware; or "auto", as tuned, else on a GPU the kernels, and XLA.
      blocks: both kernels'; by default `default_blocks`.

    Raises:
      TypeError: logits or weights are not floating.
      ValueError: the shapes do not fit, labels are not integers, `label_smoothing` is not in
        [0, 1), or a name or `blocks` is refused.
      NotImplementedError: the kernels were asked for by name and do not have this dtype, or their
        forward-mode derivative was asked for.
    """
    _check(logits, labels, weights, label_smoothing)
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)
    covered = logits.dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
    backend, blocks = selection.resolve(
        calls.CrossEntropy(logits.shape, float(label_smoothing), dtype=logits.dtype.name),
        backend,
        possible=covered,
        guess=launch.is_countable(logits),
        blocks=blocks,
    )
    if backend != "xla" and not covered:
        raise NotImplementedError(
            f"logits of {logits.dtype} have no kernel: bfloat16, float16 and float32 have; "
            "backend='xla' takes any"
        )
    if blocks is not None and blocks.group & (blocks.group - 1):
        raise ValueError(f"blocks of group={blocks.group} must be a power of two")
    # One number for all labels that are no class, and room for all that are, which a uint8 lacks.
    wide = labels.astype(jnp.promote_types(labels.dtype, jnp.int32))
    labels = jnp.where((wide >= 0) & (wide < logits.shape[-1]), wide, -1).astype(jnp.int32)
    weights = None if weights is None else jnp.asarray(weights).astype(jnp.float32)
    if backend == "xla":
        ignored = jnp.zeros(labels.shape, bool) if weights is None else weights == 0
        return _weighted(_xla(label_smoothing, logits, labels, ignored)[0], weights)
    problem = _Problem(label_smoothing, backend, blocks)

    def run(logits, labels):
        flat = (logits, labels) if labels.ndim else (logits[None], labels[None])
        return _kernel(problem, *prepared(*flat))[0].reshape(labels.shape)

    batch = " ".join(f"b{axis}" for axis in range(labels.ndim))
    loss = typed(run, [logits, labels], [f"{batch} n".strip(), batch], batch)
    return _weighted(loss, weights)


def _weighted(loss: Array, weights: Array | None) -> Array:
    if weights is None:
        return loss
    return jnp.where((weights == 0) & ~jnp.isfinite(loss), 0, loss) * weights


def _check(logits: Array, labels: Array, weights: Array | None, label_smoothing: float) -> None:
    """Refuses, before any work, arguments that do not fit."""
    floating = {"logits": logits} | ({} if weights is None else {"weights": weights})
    epilogue.check_floating(**floating)
    if logits.ndim < 1 or logits.shape[:-1] != labels.shape:
        raise ValueError(f"labels of shape {labels.shape} must be one for each of {logits.shape}")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"labels of dtype {labels.dtype} must be integers")
    if weights is not None and weights.shape != labels.shape:
        raise ValueError(f"weights of shape {weights.shape} must be labels' shape {labels.shape}")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing={label_smoothing} must be in [0, 1)")


def default_blocks(shape: tuple[int, int], dtype: DTypeLike) -> Blocks:
    """Blocks for (rows, n), with no spills on sm_80, sm_90 and sm_100."""
    rows, classes = shape
    # A row has more threads where there are few rows, so that a GPU has enough reads on their way.
    blocks_at_one_time = rows // MULTIPROCESSORS
    n = side(
        classes, 2048 if blocks_at_one_time >= 8 else 4096 if blocks_at_one_time >= 4 else 8192
    )
    warps = max(2, n // 512)
    group = min(max(1, 512 * warps // n), 1 << (max(rows, 1) - 1).bit_length())
    return Blocks(16, n, 16, warps, stages=1, group=group)


def search_space(shape: tuple[int, int], dtype: DTypeLike) -> list[Blocks]:
    """What a tuner tries for (rows, n), the default first."""
    found = [default_blocks(shape, dtype)]
    for warps in (2, 4, 8, 16):
        for n in (256, 1024, 2048, 4096, 8192):
            n = side(shape[1], n)
            for elements in (8, 16, 32):
                group = elements * 32 * warps // n
                if 1 <= group <= 32 and 16 * n <= 256 * 32 * warps:
                    blocks = Blocks(16, n, 16, warps, stages=1, group=group)
                    if blocks not in found:
                        found.append(blocks)
    return found
