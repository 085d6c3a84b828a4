"""First values of parameters, drawn about as fast as memory takes them.

    Conv(64, (3, 3), kernel_init=variance_scaling(2.0, "fan_out", "normal"))

An initialiser is called as flax's are, with a key, a shape and a dtype, and gives the numbers that
`jax.random` gives for that key in float32, to the bit (Threefry-2x32: Salmon et al., Parallel
Random Numbers: As Easy as 1, 2, 3, 2011), drawn in another way. On a CPU jax keeps the cipher's
twenty rounds in a loop over whole arrays, which goes through memory some forty times and is
compiled for each shape. Here the rounds are written out, so that a number stays in its register
until it is done; and outside of jit arrays are filled piece by piece, by one program for all
shapes.

While a network declares its parameters (`declaring`), an initialiser gives what is to be drawn
instead, a `Draw`: see `convjax.models.network`. Keys that are not Threefry's are left to
`jax.random`; raw ones of two words count as Threefry's.
"""

import contextlib
import contextvars
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array, Float

Distribution = Literal["normal", "truncated_normal", "uniform", "constant"]
Fan = Literal["fan_in", "fan_out", "fan_avg"]

_PIECE = 2**17
"""Numbers drawn at once outside of jit: they fit a core's cache."""

_TRUNCATED_STDDEV = 0.87962566103423978
"""Of the standard normal distribution between -2 and 2."""


@dataclass(frozen=True)
class _Declaring:
    """How many copies of each parameter are declared, outermost first, and in which trace."""

    copies: tuple[int, ...]
    trace: Any


_declaring: contextvars.ContextVar[_Declaring | None]
_declaring = contextvars.ContextVar("declaring", default=None)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Draw:
    """Numbers that are to be drawn.

    Attributes:
      distribution: their distribution.
      width: its standard deviation, half of its width if it is uniform, its value if constant.
      shape: of the array.
      dtype: of the array.
    """

    distribution: Distribution
    width: float
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __call__(self, key: Any) -> Array:
        """The numbers for a key, inside or outside of jit; None will do for a constant."""
        if self.distribution == "constant":
            if isinstance(key, Tracer):
                return jnp.full(self.shape, self.width, self.dtype)
            return jnp.asarray(np.full(self.shape, self.width, self.dtype))  # compiles nothing
        data = _threefry_words(key)
        if data is None:
            numbers = self._as_jax_draws(key)
        elif isinstance(data, Tracer):
            numbers = _numbers(self.distribution, math.prod(self.shape), data, 0, self.width)
        else:
            numbers = _filled(self.distribution, math.prod(self.shape), data, self.width)
        return jnp.asarray(numbers.reshape(self.shape), self.dtype)

    def __jax_array__(self) -> Array:
        """Tell a layer that computes with its parameters that these are not there yet."""
        raise TypeError("numbers that are to be drawn cannot be computed with")

    def _as_jax_draws(self, key: Array) -> Array:
        if self.distribution == "uniform":
            return jax.random.uniform(key, self.shape, minval=-self.width, maxval=self.width)
        if self.distribution == "normal":
            return self.width * jax.random.normal(key, self.shape)
        return self.width * jax.random.truncated_normal(key, -2.0, 2.0, self.shape)


Initialiser = Callable[..., Any]
"""From (key, shape, dtype) to an array, or to a `Draw` while a network declares its parameters."""


@dataclass(frozen=True)
class _Scaling:
    """The width of a distribution by the shape of a kernel."""

    scale: float
    fan: Fan
    distribution: Distribution

    def width(self, shape: tuple[int, ...]) -> float:
        taps = math.prod(shape[:-2])
        fans = {"fan_in": taps * shape[-2], "fan_out": taps * shape[-1]}
        stddev = math.sqrt(self.scale / fans.get(self.fan, sum(fans.values()) / 2))
        widths = {"uniform": math.sqrt(3), "truncated_normal": 1 / _TRUNCATED_STDDEV}
        return stddev * widths.get(self.distribution, 1.0)


def _draw(
    distribution: Distribution,
    width: float | _Scaling,
    key: Any,
    shape: Sequence[int],
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> Array | Draw:
    shape, dtype, now = tuple(shape), jnp.dtype(dtype).name, _declaring.get()
    width = width.width(shape) if isinstance(width, _Scaling) else width
    if now is None:
        return Draw(distribution, width, shape, dtype)(key)
    if now.trace != _trace():
        raise TypeError("a transformed layer draws its parameters on its own")
    return Draw(distribution, width, (*now.copies, *shape), dtype)


def normal(stddev: float) -> Initialiser:
    """N(0, stddev²)."""
    return partial(_draw, "normal", stddev)


def truncated_normal(stddev: float) -> Initialiser:
    """N(0, stddev²) cut off at two standard deviations; what is left has 0.88 of stddev."""
    return partial(_draw, "truncated_normal", stddev)


def uniform(bound: float) -> Initialiser:
    """U(-bound, bound)."""
    return partial(_draw, "uniform", bound)


def constant(value: float) -> Initialiser:
    """The same number everywhere."""
    return partial(_draw, "constant", value)


zeros, ones = constant(0.0), constant(1.0)


def variance_scaling(scale: float, fan: Fan, distribution: Distribution) -> Initialiser:
    """Numbers of variance scale / fan, for kernels [*taps, c_in, c_out].

    Glorot and Bengio, 2010: 1, "fan_avg". He et al., 2015, arXiv:1502.01852: 2, "fan_in".
    """
    return partial(_draw, distribution, _Scaling(scale, fan, distribution))


@contextlib.contextmanager
def declaring(copies: int | None = None) -> Iterator[None]:
    """Initialisers give a `Draw` in here; with `copies`, of as many arrays on a new first axis.

    Not under another transformation within it, such as `nn.vmap` or `nn.scan`, which would stack
    what is drawn: there they raise a TypeError.
    """
    already = _declaring.get() or _Declaring((), _trace())
    added = () if copies is None else (copies,)
    token = _declaring.set(replace(already, copies=(*already.copies, *added)))
    try:
        yield
    finally:
        _declaring.reset(token)


def is_declaring() -> bool:
    """Whether initialisers give a `Draw` here."""
    return _declaring.get() is not None


def fold_in(key: Array, number: int) -> Array:
    """`jax.random.fold_in`, which outside of jit would have to be compiled, and waits for it."""
    data = _threefry_words(key)
    if data is None or isinstance(data, Tracer):
        return jax.random.fold_in(key, number)
    words = np.asarray(data)[:, None]  # arrays, for numpy warns of scalars that wrap around
    return jnp.asarray(np.concatenate(_threefry(words, np.uint32(0), np.uint32(number))))


def _trace() -> Any:
    """Which transformation is under way, as flax tells them apart."""
    return get_opaque_trace_state(convention="flax")


def _threefry_words(key: Array) -> Any:
    """The key's two words, or None if it is another generator's."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key if key.shape[-1] == 2 else None
    return jax.random.key_data(key) if jax.random.key_impl(key) == "threefry2x32" else None


def _filled(distribution: Distribution, size: int, data: Array, width: float) -> np.ndarray:
    """The numbers, in pieces, by one compiled program for all sizes."""
    # jax takes over memory that begins on a cache line, and copies what does not.
    memory = np.empty(size + 16, np.float32)
    flat = memory[-memory.ctypes.data // 4 % 16 :][:size]
    words = np.asarray(data)  # of no device, so that they may meet any mesh

    def fill(start: int) -> None:
        piece = _numbers(distribution, _PIECE, words, start, width)
        flat[start : start + _PIECE] = np.asarray(piece)[: size - start]

    starts = range(0, size, _PIECE)
    if len(starts) < 8:  # threads cost more than they bring
        for start in starts:
            fill(start)
    else:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(fill, starts))
    return flat


@partial(jax.jit, static_argnums=(0, 1))
def _numbers(
    distribution: Distribution, size: int, data: Any, start: int | Array, width: float | Array
) -> Float[Array, " size"]:
    """`width` times the standard distribution's numbers from the `start`-th one on."""
    low, high = np.float32(-1.0), np.float32(1.0)
    if distribution == "normal":
        low = np.nextafter(low, np.float32(0))
    elif distribution == "truncated_normal":
        low, high = (np.float32(side * math.erf(math.sqrt(2))) for side in (low, high))
    index = jnp.uint32(start) + lax.iota(jnp.uint32, size)
    bits = lax.bitwise_xor(*_threefry(data, np.uint32(0), index))
    # 23 random bits are the fraction of a number in [1, 2).
    fraction = lax.bitcast_convert_type((bits >> 9) | np.uint32(0x3F800000), jnp.float32) - 1
    numbers = jnp.maximum(fraction * (high - low) + low, low)
    if distribution != "uniform":
        numbers = np.float32(math.sqrt(2)) * lax.erf_inv(numbers)
    if distribution == "truncated_normal":
        inside = np.nextafter(np.float32(2), np.float32(0))
        numbers = jnp.clip(numbers, -inside, inside)
    return numbers * width


def _threefry(key: Any, high: Any, low: Any) -> tuple[Any, Any]:
    """The cipher's two words for a counter of two words, in uint32 of numpy or jax."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    a, b = high + keys[0], low + keys[1]
    for group in range(5):
        for distance in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            a = a + b
            b = a ^ ((b << np.uint32(distance)) | (b >> np.uint32(32 - distance)))
        a = a + keys[(group + 1) % 3]
        b = b + keys[(group + 2) % 3] + np.uint32(group + 1)
    return a, b
