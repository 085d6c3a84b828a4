"""attention against float64 numpy: results and gradients of XLA and of the kernels, interpreted;
then what the interpreter cannot show, the transformations, and that memory is linear in length."""

import importlib
import os
import re
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import Blocks, attention_kernels, attention_xla, calls
from pallas_kernels.attention import attention, default_blocks, reference, search_space
from pallas_kernels.inspect import lowering, query
from pallas_kernels.inspect.roofline import default_gpu
from tests.compiling import quick_jit
from tests.pallas_kernels.arrays import assert_close, distance, float64, normal
from tests.pallas_kernels.references import TOLERANCE
from tests.pallas_kernels.test_transformations import loss, stacked

# Half of what other kernels draw: each case here compiles three.
FEW, MANY = -(-int(os.environ.get("CONVJAX_DRAWS", "5")) // 2), 500

# jax 0.12 warns that a later one will drop this lowering.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

module = importlib.import_module("pallas_kernels.attention")  # the package has the function

H200 = AbstractDevice("NVIDIA H200", 132, "cuda")


@dataclass(frozen=True)
class Case:
    """An attention of t queries to s keys, in drawn numbers."""

    t: int
    s: int
    d: int = 16
    b: int = 1
    h: int = 1
    causal: bool = False
    lengths: tuple[int, ...] | None = None
    scale: float | None = None
    dtype: Any = jnp.float32
    size: float = 1.0
    """Of the numbers in q: that of the scores."""

    @property
    def operands(self):
        """(q, k, v, dy)."""
        of_t, of_s = (self.b, self.t, self.h, self.d), (self.b, self.s, self.h, self.d)
        q, *rest = (normal(i, shape) for i, shape in enumerate((of_t, of_s, of_s, of_t)))
        return [x.astype(self.dtype) for x in (self.size * q, *rest)]

    @property
    def options(self):
        lengths = None if self.lengths is None else jnp.asarray(self.lengths, jnp.int32)
        return {"causal": self.causal, "key_lengths": lengths, "scale": self.scale}


def by_numpy(case):
    """(y, dq, dk, dv) in float64, by the equation and its derivative; and the norm that each has if
    nothing cancels, on average over the signs of its terms."""
    q, k, v, dy = map(float64, case.operands)
    scale = max(case.d, 1) ** -0.5 if case.scale is None else case.scale
    seen = np.ones((case.b, 1, case.t, case.s), bool)
    if case.causal:
        seen &= np.tri(case.t, case.s, dtype=bool)
    if case.lengths is not None:
        seen &= (np.arange(case.s) < np.array(case.lengths)[:, None])[:, None, None]
    scores = np.where(seen, scale * np.einsum("bthd,bshd->bhts", q, k), -np.inf)
    powers = np.exp(scores - np.max(scores, axis=-1, keepdims=True, initial=-1e300))
    total = powers.sum(-1, keepdims=True)
    weights = powers / np.where(total == 0, 1, total)
    slopes = np.einsum("bthd,bshd->bhts", dy, v)
    mean = (weights * slopes).sum(-1, keepdims=True)

    def products(weights, v, slopes, k, q, dy):
        return (
            np.einsum("bhts,bshd->bthd", weights, v),
            np.einsum("bhts,bshd->bthd", slopes, k),
            np.einsum("bhts,bthd->bshd", slopes, q),
            np.einsum("bhts,bthd->bshd", weights, dy),
        )

    exact = products(weights, v, scale * weights * (slopes - mean), k, q, dy)
    apart = abs(scale) * weights * (abs(slopes) + abs(mean))
    squares = products(*(x**2 for x in (weights, v, apart, k, q, dy)))
    return exact, [np.sqrt(x.sum()) for x in squares]


def computed(case, backend="interpret", jit: Any = quick_jit):
    """(y, dq, dk, dv)."""
    *operands, dy = case.operands

    @jit
    def run(operands, dy):
        y, pull = jax.vjp(partial(attention, backend=backend, **case.options), *operands)
        return y, *pull(dy)

    return run(operands, dy)


def assert_agrees(case, backend="interpret", tolerance=None):
    """The worst error, relative to the norm, after asserting that it is small."""
    worst = 0.0
    for name, actual, exact, norm in zip(
        ("y", "dq", "dk", "dv"), computed(case, backend), *by_numpy(case), strict=True
    ):
        assert (actual.shape, actual.dtype) == (exact.shape, case.dtype), name
        error = distance(actual, exact, norm)
        allowed = tolerance or TOLERANCE[jnp.dtype(case.dtype).name]
        assert error <= allowed, f"{name} is off by {error:.1e} of its norm"
        worst = max(worst, error)
    return worst


@contextmanager
def every_launch_in(blocks):
    """Gradients have launches too, which the argument `blocks` does not reach."""
    with pytest.MonkeyPatch.context() as patch:
        if blocks is not None:
            patch.setattr(module, "default_blocks", lambda *_, **__: blocks)
        yield


@st.composite
def cases(draw, most=70):
    """Lengths that are one, prime, a tile's, several tiles' or between."""
    t, s = (draw(st.sampled_from([1, 16, 47, 64]) | st.integers(1, most)) for _ in range(2))
    b = draw(st.integers(1, 2))
    lengths = st.none() | st.tuples(*[st.integers(0, s + 3)] * b)
    return Case(
        t,
        s,
        d=draw(st.sampled_from([1, 8, 16, 24, 32, 80])),
        b=b,
        h=draw(st.integers(1, 2)),
        causal=draw(st.booleans()),
        lengths=draw(lengths),
        scale=draw(st.sampled_from([None, None, 0.3, -0.2])),
        dtype=draw(st.sampled_from([jnp.float32, jnp.float16, jnp.bfloat16])),
    )


sides = st.sampled_from([16, 32])
blocks = st.none() | st.builds(Blocks, sides, sides, sides)


@pytest.mark.parametrize("draws", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_kernels_agree_with_numpy_on_drawn_cases(draws):
    worst = {}

    # Without shrinking: what is drawn is small, and to compile it takes seconds.
    @settings(max_examples=draws, phases=[Phase.generate])
    @given(case=cases(), blocks=blocks)
    def each(case, blocks):
        with every_launch_in(blocks):
            error = assert_agrees(case)
        name = jnp.dtype(case.dtype).name
        worst[name] = max(worst.get(name, 0), error)

    each()
    print("\nworst errors:", {name: f"{error:.1e}" for name, error in worst.items()})


@settings(max_examples=FEW, phases=[Phase.generate])
@given(case=cases(most=40), chunk=st.sampled_from([2**22, 100]))
def test_xla_agrees_with_numpy_on_drawn_cases(case, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_xla, "SCORES_AT_ONCE", chunk)
        # XLA rounds the slopes of the scores, and on a CPU sums, to the operands' dtype.
        assert_agrees(case, "xla", 3 * TOLERANCE[jnp.dtype(case.dtype).name])


CASES = {
    "ViT-B/16's": (Case(197, 197, d=64, dtype=jnp.bfloat16), None),
    "ViT-B/32's": (Case(50, 50, d=64, dtype=jnp.float16), None),
    "lengths": (Case(20, 70, b=4, lengths=(0, 1, 32, 99)), Blocks(16, 32, 16)),
    "one key": (Case(5, 1), None),
}

MORE_CASES = {
    "ViT-H/14's heads of 80 channels": (Case(40, 40, d=80), None),
    "577 tokens, causal": (Case(577, 577, causal=True), Blocks(128, 64, 16)),
    "one of all": (Case(1, 1, d=1), None),
    "more keys, causal": (Case(40, 100, causal=True), Blocks(16, 16, 16)),
    "577 tokens in tiles": (Case(577, 577), Blocks(128, 64, 16)),
    "a tile of queries smaller than one of keys": (Case(96, 96, causal=True), Blocks(16, 32, 16)),
    "more queries, causal": (Case(100, 40, causal=True), Blocks(16, 16, 16)),
    "lengths, causal": (Case(50, 50, b=3, lengths=(0, 7, 40), causal=True), Blocks(16, 16, 16)),
    "lengths of keys in one tile": (Case(20, 20, b=3, lengths=(0, 1, 19)), None),
    "one query": (Case(1, 33), None),
    "256 channels": (Case(20, 20, d=256), None),
    "no scale at all": (Case(20, 33, scale=0.0), None),
}


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_CASES)]
)
def test_kernels_agree_with_numpy(name):
    case, blocks = (CASES | MORE_CASES)[name]
    with every_launch_in(blocks):
        assert_agrees(case)


@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize("empty", ["t", "s", "d", "b", "h"])
def test_arrays_without_elements(empty, backend):
    case = replace(Case(3, 5), **{empty: 0})
    for actual, exact in zip(computed(case, backend, jax.jit), by_numpy(case)[0], strict=True):
        np.testing.assert_array_equal(actual, exact)


def test_scores_of_ten_thousand():
    case = Case(40, 40, scale=1.0, size=2500.0)
    q, k, *_ = map(float64, case.operands)
    assert np.abs(np.einsum("bthd,bshd->bhts", q, k)).max() > 1e4
    with every_launch_in(Blocks(16, 16, 16)):
        # float32 has 24 bits, and a score of 2¹⁴ leaves 10 of them after its point.
        assert_agrees(case, tolerance=1e-3)


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_what_follows_the_last_key_is_not_read(backend):
    case = Case(20, 40, b=2, lengths=(0, 17))
    q, k, v, _ = case.operands
    garbage = np.arange(40)[None, :, None, None] >= np.array(case.lengths)[:, None, None, None]
    bad = jnp.where(garbage, jnp.nan, 1)

    @quick_jit
    def run(q, k, v):
        y, pull = jax.vjp(partial(attention, backend=backend, **case.options), q, k, v)
        return y, *pull(y)

    with every_launch_in(Blocks(16, 16, 16)):
        results = zip(run(q, k, v), run(q, k * bad, v * bad), strict=True)
    for clean, dirty in results:
        np.testing.assert_array_equal(clean, dirty)
        np.testing.assert_array_equal(clean[0], 0)  # the image without keys
        assert np.any(clean[1] != 0)


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_nan_is_not_hidden(backend):
    call = quick_jit(partial(attention, backend=backend))
    for place in range(3):
        q, k, v, _ = Case(20, 20).operands
        arrays = [q, k, v]
        arrays[place] = arrays[place].at[0, 7, 0, 3].set(jnp.nan)
        assert bool(jnp.isnan(call(*arrays)[0, 7]).any())


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_causal_means_that_later_keys_change_nothing_before_them(backend):
    q, k, v, dy = Case(50, 50).operands
    changed = 33

    @quick_jit
    def run(q, k, v):
        y, pull = jax.vjp(partial(attention, causal=True, backend=backend), q, k, v)
        return y, pull(dy.at[:, changed:].set(0))

    with every_launch_in(Blocks(32, 16, 16)):
        y, gradients = run(q, k, v)
        other, _ = run(q, k.at[:, changed].add(1), v.at[:, changed].mul(-2))
    np.testing.assert_array_equal(y[:, :changed], other[:, :changed])
    assert np.all(np.any(np.asarray(y[:, changed:] != other[:, changed:]), axis=-1))
    for gradient in gradients:
        np.testing.assert_array_equal(gradient[:, changed:], 0)
        assert np.any(gradient[:, changed - 1] != 0)


def test_dtypes_meet_and_float64_stays():
    def dtype(*dtypes):
        return jax.eval_shape(
            attention, *(jax.ShapeDtypeStruct((1, 2, 1, 4), each) for each in dtypes)
        ).dtype

    assert dtype(jnp.bfloat16, jnp.bfloat16, jnp.float32) == jnp.float32
    assert dtype(jnp.float16, jnp.float16, jnp.float16) == jnp.float16
    with jax.enable_x64(True):
        assert dtype(jnp.float64, jnp.float64, jnp.float64) == jnp.float64


def test_the_reference_is_the_equation_in_float32():
    case = Case(20, 30, causal=True, dtype=jnp.bfloat16)
    y = quick_jit(partial(reference, **case.options))(*case.operands[:3])
    assert y.dtype == jnp.float32
    assert_close(y, by_numpy(case)[0][0], 1e-5)


# Transformations.

ARRAYS = Case(6, 5, b=2, d=8)


def operands_of(lead=()):
    """q, k and v by name, each with the axes `lead` in front."""
    shapes = zip("qkv", ARRAYS.operands, strict=False)
    return {name: normal(i, (*lead, *x.shape)) for i, (name, x) in enumerate(shapes)}


def operation(backend, lengths=(0, 4)):
    key_lengths = None if lengths is None else jnp.asarray(lengths, jnp.int32)
    return lambda x: attention(**x, key_lengths=key_lengths, backend=backend)


def through_a_scan(function):
    def run(operands):
        def step(total, scale):
            return total + function({**operands, "q": scale * operands["q"]}), None

        return jax.lax.scan(step, 0 * function(operands), jnp.arange(1.0, 4.0))[0]

    return run


TRANSFORMATIONS = {
    "grad of scan of checkpoint": lambda f: jax.grad(loss(through_a_scan(jax.checkpoint(f)))),
    "grad of vmap": lambda f: jax.grad(loss(lambda x: jax.vmap(f)(stacked(x)))),
}


def assert_same(transform, operands):
    """Asserts that the kernels and XLA give the same under a transformation."""
    kernel, xla = (quick_jit(transform(operation(backend))) for backend in ("interpret", "xla"))
    for actual, expected in zip(
        jax.tree.leaves(kernel(operands)), jax.tree.leaves(xla(operands)), strict=True
    ):
        assert_close(actual, float64(expected), 1e-5)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformed_kernels_give_what_xlas_operations_give(name):
    assert_same(TRANSFORMATIONS[name], operands_of())


def test_vmap_over_some_operands():
    operands = operands_of()
    operands["k"] = jnp.stack([operands["k"], 2 * operands["k"]])
    axes = ({"q": None, "k": 0, "v": None},)
    assert_same(lambda f: jax.vmap(f, axes), operands)


def equations(jaxpr):
    """All of them in a jaxpr, kernels and loops included."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, tuple | list) else (parameter,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def launches(function, *operands):
    """The names of the kernels, in order."""
    found = equations(jax.make_jaxpr(function)(*operands).jaxpr)
    return [each.params["name"] for each in found if each.primitive.name == "pallas_call"]


def test_a_vmap_over_all_arrays_is_one_launch_of_each_kernel():
    mapped = jax.vmap(operation("interpret"))
    assert launches(mapped, operands_of(lead=(3,))) == ["attention"]
    gradient = jax.grad(loss(mapped))
    names = ["attention", "attention_dq", "attention_dkv"]
    assert launches(gradient, operands_of(lead=(3,))) == names


MODES = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jvp under jit": lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
    "jvp of grad": lambda f, x: jax.jvp(jax.grad(loss(f)), (x,), (x,)),
}


@pytest.mark.parametrize("mode", MODES)
def test_forward_mode_is_refused_with_the_backend_that_has_it(mode):
    with pytest.raises(NotImplementedError, match="no forward-mode derivative: use backend='xla'"):
        MODES[mode](operation("interpret"), operands_of())


def test_a_second_derivative_is_refused_with_the_backend_that_has_it():
    def second(backend):
        first = jax.grad(loss(operation(backend)))
        second = jax.grad(lambda x: jnp.sum(first(x)["q"] ** 2))
        return jax.eval_shape(second, operands_of())

    with pytest.raises(NotImplementedError, match="no second derivative: use backend='xla'"):
        second("interpret")
    second("xla")


def test_xla_has_forward_mode():
    case = Case(20, 20, causal=True)
    q, k, v, dy = case.operands
    call = partial(attention, backend="xla", **case.options)
    _, tangent = quick_jit(lambda q: jax.jvp(lambda q: call(q, k, v), (q,), (q,)))(q)
    assert_close(jnp.vdot(tangent, dy), np.vdot(by_numpy(case)[0][1], q), 1e-5)


def test_the_backward_pass_keeps_the_operands_the_result_and_a_number_a_query():
    case = Case(40, 30, b=2, h=3)
    q, k, v, _ = case.operands
    _, pull = jax.eval_shape(partial(jax.vjp, partial(attention, backend="interpret")), q, k, v)
    kept = sum(leaf.size for leaf in jax.tree.leaves(pull))
    assert kept == 2 * q.size + 2 * k.size + case.b * case.h * case.t


# Memory.


def largest(case, backend):
    """The largest array in the program of a result and its gradients, kernels' insides included."""
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case.operands]

    def run(q, k, v, dy):
        y, pull = jax.vjp(partial(attention, backend=backend, causal=case.causal), q, k, v)
        return y, pull(dy)

    jaxpr = jax.make_jaxpr(run)(*arrays).jaxpr
    return max(
        getattr(variable.aval, "size", 0)
        for equation in equations(jaxpr)
        for variable in equation.outvars
    )


@pytest.mark.parametrize("causal", [False, True])
def test_no_array_has_an_element_for_each_query_and_key(causal):
    case = Case(4096, 4096, causal=causal)
    assert largest(case, "triton") == 4096 * 16  # q itself
    assert largest(case, "xla") <= attention_xla.SCORES_AT_ONCE


# Meshes.

GATHERS = ("all-gather", "all-to-all", "collective-permute", "all-reduce")
IMAGES_AND_HEADS = P("data", None, "model")


def mesh_of(*sizes, axis_type=AxisType.Auto):
    return jax.make_mesh(
        sizes, ("data", "model")[: len(sizes)], axis_types=(axis_type,) * len(sizes)
    )


def collectives(compiled):
    return [name for name in GATHERS if re.search(rf" {name}(-start)?\(", compiled.as_text())]


def assert_stays_split(mesh, run, *operands):
    """Asserts that `run` of a backend and arrays, all split alike, splits its results so too."""
    sharding = NamedSharding(mesh, IMAGES_AND_HEADS)
    arrays = [jax.device_put(x, sharding) for x in operands]
    compiled = quick_jit(partial(run, "interpret")).lower(*arrays).compile()
    assert collectives(compiled) == []
    for actual, expected in zip(
        compiled(*arrays), quick_jit(partial(run, "xla"))(*operands), strict=True
    ):
        assert actual.sharding.is_equivalent_to(sharding, actual.ndim)
        assert_close(actual, float64(expected), 1e-5)


def test_images_and_heads_stay_split():
    def run(backend, q, k, v, dy):
        call = partial(attention, key_lengths=jnp.arange(4), causal=True, backend=backend)
        y, pull = jax.vjp(call, q, k, v)
        return y, *pull(dy)

    assert_stays_split(mesh_of(4, 2), run, *Case(6, 5, b=4, h=4, d=8).operands)


def test_axes_may_be_part_of_the_type():
    def run(backend, *operands):
        return (attention(*operands, key_lengths=jnp.arange(4), backend=backend),)

    mesh = mesh_of(4, 2, axis_type=AxisType.Explicit)
    assert_stays_split(mesh, run, *Case(6, 5, b=4, h=4, d=8).operands[:3])


def test_queries_split_over_devices_are_gathered():
    case = Case(16, 16, d=8)
    mesh = mesh_of(8)
    arrays = [jax.device_put(x, NamedSharding(mesh, P(None, "data"))) for x in case.operands[:3]]
    compiled = quick_jit(partial(attention, backend="interpret")).lower(*arrays).compile()
    assert collectives(compiled) == ["all-gather"]
    assert_close(compiled(*arrays), by_numpy(case)[0][0], 1e-5)


def test_shard_map():
    case = Case(6, 5, b=8, d=8, lengths=tuple(range(8)))
    mapped = jax.shard_map(
        lambda q, k, v, n: attention(q, k, v, key_lengths=n, backend="interpret"),
        mesh=mesh_of(8),
        in_specs=(P("data"),) * 4,
        out_specs=P("data"),
        check_vma=False,
    )
    y = quick_jit(mapped)(*case.operands[:3], case.options["key_lengths"])
    assert_close(y, by_numpy(case)[0][0], 1e-5)


# Lowering.


def kernels(case, **options):
    """The names of the Triton kernels in the program, for a GPU, of a result and its gradients."""
    mesh = AbstractMesh((1,), ("device",), (AxisType.Auto,), abstract_device=H200)
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case.operands]

    def run(q, k, v, dy):
        y, pull = jax.vjp(partial(attention, **case.options, **options), q, k, v)
        return y, pull(dy)

    with jax.sharding.use_abstract_mesh(mesh):
        program = jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    names = re.findall(r' name = "(\w+)", num_stages', program)
    assert len(names) == program.count("custom_call @__gpu$xla.gpu.triton")
    return sorted(names)


ALL = ["attention", "attention_dkv", "attention_dq"]


PASSES: dict[calls.Pass, str] = {
    "forward": "attention",
    "input_gradient": "attention_dq",
    "kernel_gradient": "attention_dkv",
}


@dataclass(frozen=True)
class Call(calls.Attention):
    """One that may have key lengths."""

    lengths: tuple[int, ...] | None = None

    def function(self, **options):
        lengths = None if self.lengths is None else jnp.asarray(self.lengths, jnp.int32)
        return partial(attention, causal=self.causal, key_lengths=lengths, **options)


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (Call((1, 197, 1, 64)), {}),
        (Call((1, 577, 2, 80), s=300, causal=True, dtype="float16"), {}),
        (Call((2, 1, 1, 1), s=600, causal=True, lengths=(3, 4)), {}),
        (Call((2, 600, 1, 16), s=600, lengths=(3, 600)), {}),
        (Call((2, 600, 1, 24), s=1, lengths=(0, 1), dtype="float32"), {"precision": "highest"}),
    ],
)
def test_triton_takes_every_kernel(call, options):
    # To read the kernel's code again is to have it verified.
    for which, name in PASSES.items():
        trace = lowering.lower(call, which, default_gpu("sm_90"), **options)
        assert [each.algorithm for each in trace.launches] == [name]


def test_auto_is_the_kernels_for_16_bits_on_a_gpu_and_xla_elsewhere():
    assert kernels(Case(50, 50, d=64, dtype=jnp.bfloat16)) == ALL
    assert kernels(Case(50, 50, d=64)) == []
    assert kernels(Case(50, 50, d=257, dtype=jnp.bfloat16)) == []
    assert launches(attention, *Case(5, 5, dtype=jnp.bfloat16).operands[:3]) == []


# Blocks.

SHAPES = {
    "ViT-B/16": (128, 197, 12, 64),
    "ViT-L/16 at 384": (32, 577, 16, 64),
    "ViT-B/32": (128, 50, 12, 64),
    "ViT-H/14": (128, 256, 16, 80),
    "1,024 tokens": (8, 1024, 12, 64),
    "4,096 tokens": (4, 4096, 16, 128),
}


@pytest.mark.parametrize("d", [1, 24, 64, 80, 96, 128, 200, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_the_search_space_starts_with_the_default_and_covers_the_head(dtype, d):
    for kernel in ("forward", "query_gradient", "key_gradients"):
        for t, s in ((1, 1), (50, 50), (197, 3), (4096, 4096)):
            default = default_blocks((t, s, d), dtype, kernel=kernel)
            found = search_space((t, s, d), dtype, kernel=kernel)
            assert found[0] == default
            assert len(set(found)) == len(found)
            widths = attention_kernels.widths(d, default.k)
            assert d <= sum(widths) < max(2 * d, 17)
            assert all(width >= 16 and width & (width - 1) == 0 for width in widths)


def test_keys_of_a_small_image_are_one_tile_without_a_loop():
    def loops(t):
        q = jax.ShapeDtypeStruct((1, t, 1, 64), jnp.bfloat16)
        jaxpr = jax.make_jaxpr(partial(attention, backend="triton"))(q, q, q)
        return [e for e in equations(jaxpr.jaxpr) if e.primitive.name in ("while", "scan")]

    assert loops(50) == loops(100) == []
    assert len(loops(577)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_no_kernel_spills_and_all_use_the_tensor_cores(name, causal, dtype, architecture):
    pytest.importorskip("triton")
    call = Call(SHAPES[name], causal=causal, dtype=dtype)
    for which in PASSES:
        answers = query.inspect(query.Query(call, default_gpu(architecture), which))
        assert answers
        for answer in answers:
            assert answer.launch is not None
            assert answer.code is not None
            assert answer.launch.algorithm in ALL
            assert answer.code.spill_bytes == 0, answer.launch
            assert answer.code.loop_matrix_instructions or answer.code.loop_instructions == 0
            assert {"HMMA", "HGMMA", "UTCHMMA"} & set(answer.code.matrix_instructions)


# Errors.


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": jnp.ones((2, 3, 4))}, ValueError, r"q of shape \(2, 3, 4\) must have four axes"),
        ({"k": jnp.ones((2, 5, 4, 1))}, ValueError, r"k of shape \(2, 5, 4, 1\) must be"),
        ({"v": jnp.ones((2, 4, 1, 8))}, ValueError, r"v of shape .* must be of k's shape"),
        ({"q": jnp.ones((2, 6, 1, 8), int)}, TypeError, "q of dtype int32 must be floating"),
        ({"key_lengths": jnp.ones(2)}, TypeError, "key_lengths of dtype float32 must be whole"),
        ({"key_lengths": jnp.ones(3, int)}, ValueError, r"key_lengths of shape \(3,\) must be"),
        ({"backend": "cuda"}, ValueError, "backend='cuda' must be one of"),
        ({"blocks": Blocks(16, 16, 16)}, ValueError, "must be None with backend='xla'"),
    ],
)
def test_errors_name_the_value_and_the_rule(unchecked, change, error, message):
    arguments: dict[str, Any] = operands_of() | {"backend": "xla"} | change
    with pytest.raises(error, match=message):
        attention(**arguments)


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        (Case(3, 3, d=257), {}, "heads of d=257 channels have no kernel"),
        (Case(3, 3), {"precision": "BF16_BF16_F32_X3"}, "has no kernel"),
    ],
)
def test_a_kernel_asked_for_by_name_says_what_it_cannot_do(case, options, message):
    with pytest.raises(NotImplementedError, match=message):
        attention(*case.operands[:3], backend="interpret", **options)


def test_kernels_need_a_gpu():
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        attention(*Case(3, 3).operands[:3], backend="triton")
