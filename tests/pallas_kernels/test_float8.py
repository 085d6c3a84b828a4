"""8-bit floats against values written out and ml_dtypes; delayed scaling by what it does."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import float8
from pallas_kernels.float8 import E4M3, E5M2, Scale, ScaleState
from tests.pallas_kernels.arrays import float64, normal

ONE = jnp.ones(())
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


@pytest.mark.parametrize(
    ("dtype", "numbers", "expected"),
    [
        # 17 and 19 lie between two numbers: ties go to the even one. 2⁻¹⁰ is half the smallest.
        (E4M3, [17.0, 19.0, 2**-9, 1.1 * 2**-10, 2**-10], [16.0, 20.0, 2**-9, 2**-9, 0.0]),
        (E4M3, [448.0, 464.0, 1e30, -500.0], [448.0, 448.0, 448.0, -448.0]),
        (E5M2, [9.0, 11.0, 2**-16, 1.1 * 2**-17, 2**-17], [8.0, 12.0, 2**-16, 2**-16, 0.0]),
        (E5M2, [57344.0, 61440.0, 3e38, -7e4], [57344.0, 57344.0, 57344.0, -57344.0]),
    ],
)
def test_rounding_and_saturation(dtype, numbers, expected):
    np.testing.assert_array_equal(
        float64(float8.quantise(jnp.array(numbers), ONE, dtype)), expected
    )


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@given(x=st.lists(st.floats(-6e4, 6e4, width=32), min_size=9, max_size=9))
def test_rounding_is_that_of_ml_dtypes(dtype, x):
    x = np.clip(np.array(x, np.float32), -LARGEST[dtype], LARGEST[dtype])
    expected = x.astype({E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}[dtype])
    found = np.asarray(float8.quantise(jnp.asarray(x), ONE, dtype))
    np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))


def test_what_is_not_finite_shows():
    x = jnp.array([jnp.inf, -jnp.inf, jnp.nan, 1.0])
    for dtype in (E4M3, E5M2):
        found = float64(float8.quantise(x, ONE, dtype))
        np.testing.assert_array_equal(found, [np.nan, np.nan, np.nan, 1.0])


def test_a_number_that_overflows_only_when_it_is_scaled_saturates():
    tiny = jnp.float32(1.2e-38) * ONE
    assert float64(float8.quantise(jnp.array([1e20]), tiny, E4M3)).tolist() == [448.0]


def steps(magnitudes, history=4, dtype=E4M3):
    """The scales after each step."""
    state, scales = Scale.create(history), []
    for magnitude in magnitudes:
        state = float8.updated(state, jnp.float32(magnitude), dtype)
        scales.append(float(state.scale))
    return scales


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_largest_number_becomes_the_types_largest(dtype):
    assert steps([3.0] * 5, dtype=dtype) == pytest.approx([3 / LARGEST[dtype]] * 5)


def test_a_spike_is_remembered_as_long_as_the_history():
    expected = np.array([2.0, 80.0, 80.0, 80.0, 80.0, 2.0])
    np.testing.assert_allclose(steps([2, 80, 2, 2, 2, 2]), expected / 448, rtol=1e-6)


@pytest.mark.parametrize("magnitude", [0.0, jnp.inf, jnp.nan])
def test_a_step_that_says_nothing_changes_nothing(magnitude):
    assert steps([magnitude]) == [1.0]
    assert steps([2.0, magnitude]) == pytest.approx([2 / 448] * 2)


def test_scales_of_tiny_numbers_have_an_inverse():
    (scale,) = steps([1e-38])
    assert np.isfinite(np.float32(1) / np.float32(scale))


def test_a_spike_saturates_once():
    state, found = Scale.create(4), []
    for factor in (1.0, 1.0, 100.0, 100.0):
        x = factor * normal(0, (8, 8))
        q = float64(float8.quantise(x, state.scale, E4M3)) * float(state.scale)
        found.append(np.linalg.norm(q - float64(x)) / np.linalg.norm(float64(x)))
        state = float8.updated(state, float8.magnitude(x, state), E4M3)
    assert max(found[0], found[1], found[3]) < 0.04
    assert found[2] > 0.9


def test_the_largest_of_nothing_is_zero():
    assert float(float8.magnitude(jnp.zeros((0, 3)), Scale.create())) == 0


def test_one_state_for_a_batch_is_chosen_by_all_of_it():
    x = jnp.arange(-5.0, 7.0).reshape(2, 3, 2)
    one, two = Scale.create(2), jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), Scale.create(2))
    both = jax.vmap(float8.magnitude, (0, None))
    assert both(x, one).tolist() == [6, 6]
    assert jax.vmap(float8.magnitude)(x, two).tolist() == [5, 6]
    assert jax.vmap(float8.magnitude, (None, 0))(x, two).tolist() == [6, 6]
    assert jax.vmap(both, (1, 0))(jnp.stack([x, 2 * x], 1), two).tolist() == [[6, 6], [12, 12]]
    assert (
        jax.vmap(jax.vmap(float8.magnitude), (0, None))(jnp.stack([x, 2 * x]), two).tolist()
        == [[10, 12]] * 2
    )


def test_one_state_for_devices_is_chosen_by_all_of_them():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    state = Scale.create(2)
    largest = jax.shard_map(
        partial(float8.magnitude, state=state), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    assert float(jax.jit(largest)(jnp.arange(-9.0, 7.0))) == 9


def test_a_state_has_a_history():
    state = ScaleState.create(history=3)
    assert [leaf.shape for leaf in jax.tree.leaves(state)] == [(), (3,)] * 3
    with pytest.raises(ValueError, match="history=0 must be at least 1 step"):
        ScaleState.create(history=0)
