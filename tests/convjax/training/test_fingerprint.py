"""A fingerprint sees every bit and every copy, and not how arrays are split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from convjax.sharding import make_mesh
from convjax.training.fingerprint import fingerprint

MESH = make_mesh(data=4, tower=2)


def placed(array, *axes) -> jax.Array:
    return jax.device_put(array, NamedSharding(MESH, PartitionSpec(*axes)))


ARRAYS = {
    "kernel": np.random.default_rng(0).standard_normal((8, 4, 2)).astype(np.float32),
    "half": np.arange(8, dtype=jnp.bfloat16),
    "flags": np.arange(8) % 3 == 0,
    "step": np.int32(7),
    "none": np.zeros((0, 3), np.float32),
}


def test_it_is_known():
    """What is in a checkpoint must stay readable: the number of these values, once and for all."""
    state = {"a": jnp.arange(6, dtype=jnp.int32).reshape(2, 3), "b": jnp.float32(1)}
    assert fingerprint(state) == fingerprint(state, every_copy=True) == 2484661249


@pytest.mark.parametrize(
    "axes",
    [(), ("data",), ("data", "tower"), (None, "data"), (("data", "tower"),), (None, None, "tower")],
)
def test_a_split_changes_nothing(axes):
    expected = fingerprint({name: jnp.asarray(array) for name, array in ARRAYS.items()})
    split = {name: placed(array) for name, array in ARRAYS.items()}
    split["kernel"] = placed(ARRAYS["kernel"], *axes)
    split["half"] = placed(ARRAYS["half"], "tower")
    assert fingerprint(split) == expected
    assert fingerprint(split, every_copy=True) == expected


@pytest.mark.parametrize("name", ["kernel", "half", "flags", "step"])
def test_any_bit_counts(name):
    before = fingerprint({name: jnp.asarray(ARRAYS[name])})
    array = np.array(ARRAYS[name])
    content = bytearray(array.tobytes())
    bits = 8 * len(content) if name != "flags" else 0
    seen = {before}
    for bit in range(bits):
        content[bit // 8] ^= 1 << bit % 8
        changed = np.frombuffer(bytes(content), array.dtype).reshape(array.shape)
        seen.add(fingerprint({name: jnp.asarray(changed)}))
        content[bit // 8] ^= 1 << bit % 8
    assert len(seen) == bits + 1
    if name == "flags":
        assert fingerprint({name: jnp.asarray(~array)}) != before


def test_names_shapes_dtypes_and_places_count():
    array = jnp.asarray(ARRAYS["kernel"])
    others = [{"b": array}, {"a": array.reshape(4, 8, 2)}, {"a": array.view(jnp.int32)}]
    others += [{"a": array[::-1]}, {"a": array[:, ::-1]}, {"a": array.at[0].set(array[1])}]
    assert fingerprint({"a": array}) not in [fingerprint(other) for other in others]


def test_copies_that_differ_are_named():
    copies = [
        jax.device_put(np.float32([0, device == 5]), MESH.devices.flat[device])
        for device in range(8)
    ]
    whole = NamedSharding(MESH, PartitionSpec())
    state = {"bias": jax.make_array_from_single_device_arrays((2,), whole, copies)}
    with pytest.raises(ValueError, match="the devices' copies of bias differ"):
        fingerprint(state, every_copy=True)
