"""Convolution by XLA: an algorithm for each pass of training, and derivatives in either mode.

`conv2d_algorithms` has the algorithms. Each is linear in x and in w, so the tangent of a
convolution is two more of them, and what XLA makes of the transpose of a tangent is a gradient.
"""

from functools import partial, reduce
from operator import add
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

from pallas_kernels import launch, selection
from pallas_kernels.calls import Conv2d, Pass
from pallas_kernels.conv2d_algorithms import (
    ALGORITHMS,
    Algorithm,
    Algorithms,
    Convolution,
    default_algorithms,
    refusal,
    run,
)


class Plan(NamedTuple):
    """Which of XLA's algorithms computes each pass."""

    algorithms: Algorithms
    call: Conv2d | None = None
    """What the tuner may know better about; none where an algorithm was asked for by name."""

    def algorithm(self, which: Pass, convolution: Convolution) -> Algorithm:
        choice = selection.choose(self.call, which) if self.call is not None else None
        if choice is not None and choice.backend == "xla" and choice.algorithm in ALGORITHMS:
            algorithm = cast(Algorithm, choice.algorithm)
            if refusal(algorithm, convolution) is None:
                return algorithm
        return getattr(self.algorithms, which)


@partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def convolve(x: Array, w: Array, convolution: Convolution, plan: Plan) -> Array:
    """x * w, accumulated and returned in float32, or in float64 for float64."""
    accumulator = jnp.promote_types(x.dtype, jnp.float32)
    return run(plan.algorithm("forward", convolution), x, w, convolution, accumulator)


# Keeps its operands for the backward pass, not the copies that an algorithm makes of them.
_run_keeping_operands = jax.checkpoint(run, static_argnums=(0, 3, 4, 5))


@partial(convolve.defjvp, symbolic_zeros=True)
def _convolve_jvp(convolution, plan, primals, tangents):
    # The tangent is linear in (dx, dw) and its transpose is the gradient. So this is where each
    # pass gets its own algorithm, and where bfloat16 operands get bfloat16 products backward too.
    (x, w), (dx, dw) = primals, tangents
    y = convolve(x, w, convolution, plan)
    terms = []
    if not isinstance(dx, SymbolicZero):
        algorithm = plan.algorithm("input_gradient", convolution)
        terms.append(_run_keeping_operands(algorithm, dx, w, convolution, x.dtype, "x"))
    if not isinstance(dw, SymbolicZero):
        algorithm = plan.algorithm("kernel_gradient", convolution)
        terms.append(_run_keeping_operands(algorithm, x, dw, convolution, x.dtype, "w"))
    return y, reduce(add, terms).astype(y.dtype)


def convolve_transpose(y: Array, w: Array, convolution: Convolution, plan: Plan) -> Array:
    """The transpose of what computes the gradient of x: differentiable, like it, in both modes."""
    rows, columns = convolution.rows, convolution.columns
    size = {"N": y.shape[convolution.layout.index("N")], "C": convolution.c_in}
    size |= {"H": rows.extent, "W": columns.extent}
    x = jax.ShapeDtypeStruct(tuple(size[axis] for axis in convolution.layout), y.dtype)
    algorithm = plan.algorithm("input_gradient", convolution)
    (result,) = jax.linear_transpose(
        lambda x: run(algorithm, x, w, convolution, y.dtype, transposed="x"), x
    )(y)
    return result.astype(jnp.promote_types(y.dtype, jnp.float32))


def plan(convolution: Convolution, algorithm: Algorithm | None, call: Conv2d | None = None) -> Plan:
    """All passes by `algorithm`; or by the fastest known one of each, that of `call` if there is
    one and it was measured.

    Raises:
      ValueError: `algorithm` cannot compute `convolution`.
    """
    if algorithm is None:
        return Plan(default_algorithms(convolution, launch.platform()), call)
    if reason := refusal(algorithm, convolution):
        raise ValueError(f"algorithm={algorithm!r} cannot do this: {reason}")
    return Plan(Algorithms(algorithm, algorithm, algorithm))
