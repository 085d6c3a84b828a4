"""Collectives of compiled programs: who talks to whom, how much, for which layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from convjax.sharding.collectives import Part, collectives_of
from convjax.sharding.links import KINDS, LINKS, bytes_sent
from convjax.sharding.program import Program
from convjax.sharding.replica_groups import axes_of, groups_along, groups_of

PARAMS = {"conv1": {"kernel": 0, "bias": 0}, "fc": {"kernel": 0}}


def mesh_of(**sizes):
    devices = np.array(jax.devices()[: int(np.prod(list(sizes.values())))])
    return Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))


MESH = {"data": 2, "fsdp": 1, "model": 2, "tower": 2}


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, dimensions={0}", [(0, 1), (2, 3)]),
        ("replica_groups={}, to_apply=%add", [(0, 1, 2, 3, 4, 5, 6, 7)]),
        ("replica_groups=[2,4]<=[8]", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("replica_groups=[4,2]<=[4,2]T(1,0)", [(0, 2), (4, 6), (1, 3), (5, 7)]),
        ("replica_groups=[4,2]<=[2,2,2]T(2,1,0)", [(0, 4), (2, 6), (1, 5), (3, 7)]),
        ("replica_groups=mesh['a'=4,'b'=2] {'b'}, to", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("replica_groups=mesh['a'=4,'b'=1,'c'=2] {'a'}", [(0, 2, 4, 6), (1, 3, 5, 7)]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b':(1)2}", [(0, 2, 4, 6), (1, 3, 5, 7)]),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", [(0, 1), (2, 3)]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(0,3,1,2) {'b'}", [(0, 3), (1, 2)]),
        ("source_target_pairs={{0,0},{2,4},{4,2},{1,3}}", [(2, 4), (1, 3)]),
    ],
)
def test_groups_in_all_ways_of_writing(written, groups):
    assert groups_of(f", channel_id=1, {written}", 8) == frozenset(map(frozenset, groups))


def test_no_groups_are_an_error():
    with pytest.raises(ValueError, match="no replica groups in ', channel_id=1'"):
        groups_of(", channel_id=1", 8)


@pytest.mark.parametrize(
    "axes", [("data",), ("model",), ("tower",), ("data", "tower"), ("data", "model", "tower")]
)
def test_groups_have_the_names_of_axes(axes):
    mesh = mesh_of(**MESH)
    assert axes_of(groups_along(mesh, axes), mesh) == axes


def test_groups_along_the_axes_of_a_mesh():
    mesh = mesh_of(data=2, tower=4)
    assert groups_along(mesh, ("data",)) == {
        frozenset({0, 4}),
        frozenset({1, 5}),
        frozenset({2, 6}),
        frozenset({3, 7}),
    }


def test_other_groups_have_no_axis():
    mesh = mesh_of(data=2, tower=2)
    assert axes_of(frozenset([frozenset({0, 3}), frozenset({1, 2})]), mesh) is None
    pairs = frozenset([frozenset({0, 1})])
    assert axes_of(pairs, mesh) is None
    assert axes_of(pairs, mesh, pairs=True) == ("tower",)


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("all-reduce", 1500),
        ("all-gather", 3000),
        ("reduce-scatter", 750),
        ("all-to-all", 750),
        ("ragged-all-to-all", 750),
        ("collective-permute", 1000),
        ("collective-broadcast", 1000),
    ],
)
def test_the_bytes_that_each_of_four_devices_sends(kind, sent):
    assert bytes_sent(kind, 1000, 4) == sent


def test_one_device_sends_nothing_to_itself():
    sums = [kind for kind in KINDS if kind.startswith(("all", "reduce", "ragged"))]
    assert [bytes_sent(kind, 1000, 1) for kind in sums] == [0] * len(sums)


def test_links_are_as_fast_as_their_specifications():
    assert {link.name: round(link.bandwidth / 1e9, 2) for link in LINKS} == {
        "PCIe 2.0 x16": 8.0,
        "PCIe 5.0 x16": 63.02,
        "NVLink 4": 450.0,
    }
    assert LINKS[0].seconds(4_000_000) == 5e-4


# Gradients that XLA's GPU compiler put into one array, as it prints them, shortened.
COMBINED = """HloModule jit_step, is_scheduled=true

%joined (a: f32[6], b: f32[10], c: f32[1]) -> f32[17] {
  %a = f32[6]{0} parameter(0)
  %b = f32[10]{0} parameter(1)
  %c = f32[1]{0} parameter(2)
  ROOT %all = f32[17]{0} concatenate(%a, %b, %c), dimensions={0}
}

ENTRY %main (x: f32[2,3], y: f32[10], z: f32[4]) -> f32[17] {
  %x = f32[2,3]{1,0} parameter(0)
  %y = f32[10]{0} parameter(1)
  %z = f32[4]{0} parameter(2)
  %all-gather-start = (f32[4]{0}, f32[8]{0}) all-gather-start(%z), channel_id=3, \
replica_groups=mesh['axis_0'=2,'axis_1'=2] {'axis_1'}, dimensions={0}
  %all-gather-done = f32[8]{0} all-gather-done(%all-gather-start)
  %read = f32[8]{0} negate(%all-gather-done), metadata={op_name="jit(step)/jvp(Net)/fc/dot"}
  %dx = f32[2,3]{1,0} copy(%x), metadata={op_name="jit(step)/transpose(jvp(Net))/conv1/conv"}
  %flat = f32[6]{0} bitcast(%dx)
  %dy = f32[10]{0} copy(%y), metadata={op_name="jit(step)/transpose(jvp(Net))/fc/transpose"}
  %norm = f32[1]{0} copy(%dy), metadata={op_name="jit(step)/reduce_sum"}
  %joint = f32[17]{0} fusion(%flat, %dy, %norm), kind=kLoop, calls=%joined
  %all-reduce-start = f32[17]{0} all-reduce-start(%joint), channel_id=1, \
replica_groups={{0,2},{1,3}}, to_apply=%add, metadata={scheduling_name="all-reduce-start"}
  %alone = f32[10]{0} all-reduce(%dy), channel_id=2, replica_groups={{0},{1},{2},{3}}
  ROOT %all-reduce-done = f32[17]{0} all-reduce-done(%all-reduce-start)
}
"""


def test_gradients_that_are_reduced_as_one_array_are_told_apart():
    mesh = mesh_of(data=2, tower=2)
    _, summed = collectives_of(Program.parse(COMBINED), mesh, PARAMS)
    assert (summed.kind, summed.axis, summed.devices) == ("all-reduce", "data", 2)
    assert (summed.size, summed.bytes, summed.times) == (68, 68, 1)
    assert summed.parts == (
        Part("conv1", "backward", 24),
        Part("fc", "backward", 40),
        Part("optimiser, metrics", "update", 4),
    )
    assert (summed.layer, summed.phase) == ("conv1, fc, optimiser, metrics", "backward")


def test_what_is_gathered_belongs_to_who_reads_it():
    gathered, _ = collectives_of(Program.parse(COMBINED), mesh_of(data=2, tower=2), PARAMS)
    assert (gathered.kind, gathered.axis, gathered.bytes) == ("all-gather", "tower", 16)
    assert (gathered.layer, gathered.phase) == ("fc", "forward")


def test_a_step_over_two_axes():
    """A dense layer whose inputs are split over `model` and its examples over `data`."""
    mesh = mesh_of(data=2, model=2)

    def loss(params, x):
        with jax.named_scope("fc"):
            y = x @ params["fc"]["kernel"]
        return jnp.mean(y**2)

    def step(params, x):
        value, gradient = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - g, params, gradient), value

    def array(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    params = {"fc": {"kernel": array(P("model"), 8, 16)}}
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    jitted = jax.jit(step, out_shardings=(shardings, None))
    compiled = jitted.lower(params, array(P("data", "model"), 4, 8)).compile()
    found = collectives_of(Program.parse(compiled.as_text()), mesh, params)
    # XLA may sum the loss, 4 bytes, with the gradient.
    parts = [(each.kind, each.axis, part) for each in found for part in each.parts]
    assert [each for each in parts if each[2].bytes > 4] == [
        ("all-reduce", "model", Part("fc", "forward", 2 * 16 * 4)),  # y, of its own examples
        ("all-reduce", "data", Part("fc", "backward", 4 * 16 * 4)),  # of the kernel
    ]
