"""Operations in float64 numpy, with their gradients: what every backend is tested against.

Each of them takes two arrays and returns, as `jax.vjp` does, a result and the function from its
cotangent to the gradients of both.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from tests.compiling import quick_jit
from tests.pallas_kernels.arrays import distance, float64, normal

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}

ACTIVATIONS = {
    None: lambda z: z,
    "relu": lambda z: np.maximum(z, 0),
    "gelu": lambda z: z / 2 * (1 + np.vectorize(math.erf, otypes=[float])(z / math.sqrt(2))),
    "gelu_tanh": lambda z: z / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    "silu": lambda z: z / (1 + np.exp(-z)),
}


def slope(activation, z):
    """The derivative of an activation."""
    if activation == "relu":
        return (z > 0).astype(float)
    step = 1e-6
    return (ACTIVATIONS[activation](z + step) - ACTIVATIONS[activation](z - step)) / (2 * step)


def product(a, b):
    """a b, where a batch may share b."""
    swap = lambda x: x.swapaxes(-1, -2)  # noqa: E731

    def pull(dy):
        db = swap(a) @ dy
        return dy @ swap(b), db.sum(tuple(range(a.ndim - 2))) if b.ndim == 2 else db

    return a @ b, pull


def with_epilogue(operation, left, right, bias=0.0, residual=0.0):
    """z = operation(left, right) + bias + residual, and the pull of all four by name."""
    y, pull = operation(left, right)

    def pull_all(dz):
        d_left, d_right = pull(dz)
        d_bias = dz.sum(tuple(range(dz.ndim - 1)))
        return {"left": d_left, "right": d_right, "bias": d_bias, "residual": dz}

    return y + bias + residual, pull_all


@dataclass(frozen=True)
class Epilogue:
    """What goes with an operation of two arrays, and in which dtypes."""

    dtype: Any = jnp.float32
    out_dtype: Any = None
    bias_dtype: Any = None
    """None for no bias."""
    residual: bool = False
    activation: str | None = None

    @property
    def result_dtype(self):
        return self.out_dtype or self.dtype

    @property
    def coarsest(self):
        """The name of the dtype with the largest rounding errors."""
        dtypes = (self.dtype, self.result_dtype, self.bias_dtype or self.dtype)
        return max((jnp.dtype(dtype).name for dtype in dtypes), key=TOLERANCE.__getitem__)


dtypes = st.sampled_from([jnp.float32, jnp.float16, jnp.bfloat16])
epilogues = st.builds(
    Epilogue,
    dtype=dtypes,
    out_dtype=st.none() | dtypes,
    bias_dtype=st.none() | dtypes,
    residual=st.booleans(),
    activation=st.sampled_from(list(ACTIVATIONS)),
)


def assert_agrees(
    operation, reference, left_shape, right_shape, epilogue=Epilogue(), *, tolerance=None
):
    """Asserts that `operation` and all its gradients are the reference's; returns the worst error.

    Channels come last in the result, and errors are relative to the norm. Where a sum happens to
    cancel, that is the norm that it has on average over the signs of its terms: the root of the sum
    of their squares.

    Args:
      operation: takes two arrays, and by name bias, residual, activation and out_dtype.
      reference: takes two arrays of float64.
      left_shape: of the first array.
      right_shape: of the second.
      epilogue: of the operation.
      tolerance: of the norm; by default that of the epilogue's coarsest dtype.
    """
    operands = {
        "left": normal(0, left_shape, epilogue.dtype),
        "right": normal(1, right_shape, epilogue.dtype),
    }
    shape = reference(*map(float64, operands.values()))[0].shape
    if epilogue.bias_dtype is not None:
        operands["bias"] = normal(2, shape[-1:], epilogue.bias_dtype)
    if epilogue.residual:
        operands["residual"] = normal(3, shape, epilogue.dtype)
    dy = normal(4, shape, epilogue.result_dtype)

    @quick_jit
    def run(operands, dy):
        def call(left, right, **terms):
            options = {"activation": epilogue.activation, "out_dtype": epilogue.out_dtype}
            return operation(left, right, **terms, **options)

        y, pull = jax.vjp(lambda operands: call(**operands), operands)
        return y, pull(dy)[0]

    y, gradients = run(operands, dy)
    exact, exact_dy = {name: float64(x) for name, x in operands.items()}, float64(dy)
    z, pull = with_epilogue(reference, **exact)
    # Where rounding decides the sign of z, relu's gradient goes by the sign that its result has.
    slopes = slope(epilogue.activation, float64(y) if epilogue.activation == "relu" else z)
    z_squares, pull_squares = with_epilogue(reference, **{n: x**2 for n, x in exact.items()})
    expected = {"y": ACTIVATIONS[epilogue.activation](z)} | pull(exact_dy * slopes)
    squares = {"y": z_squares} | pull_squares(exact_dy**2)

    worst = 0.0
    for name, actual in {"y": y, **gradients}.items():
        dtype = operands[name].dtype if name in operands else epilogue.result_dtype
        assert (actual.shape, actual.dtype) == (expected[name].shape, dtype), name
        error = distance(actual, expected[name], math.sqrt(squares[name].sum()))
        allowed = tolerance or TOLERANCE[epilogue.coarsest]
        assert error <= allowed, f"{name} is off by {error:.1e} of its norm"
        worst = max(worst, error)
    return worst
