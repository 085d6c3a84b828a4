"""Meshes: sizes that devices give, and which rows of a batch a process has."""

import jax
import pytest
from jax.sharding import AxisType

from convjax.sharding import make_mesh, process_rows


def sizes(mesh):
    return tuple(mesh.shape.values())


def test_axes_and_what_is_left():
    mesh = make_mesh(tower=2)
    assert mesh.axis_names == ("data", "fsdp", "model", "tower")
    assert sizes(mesh) == (4, 1, 1, 2)
    assert sizes(make_mesh(data=2, model=-1)) == (2, 1, 4, 1)
    assert sizes(make_mesh(data=1)) == (1, 1, 1, 1)
    assert make_mesh(data=1).devices.item() == jax.devices()[0]
    assert sizes(make_mesh(devices=jax.devices()[:6], fsdp=3)) == (2, 3, 1, 1)


def test_the_last_axes_lie_on_neighbouring_devices():
    assert [each.id for each in make_mesh(data=4, tower=2).devices[0].flat] == [0, 1]


def test_axes_are_xlas_or_the_types():
    assert set(make_mesh().axis_types) == {AxisType.Auto}
    assert set(make_mesh(explicit=True).axis_types) == {AxisType.Explicit}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"data": 0}, "data=0 must be at least 1, or -1"),
        ({"fsdp": -2}, "fsdp=-2 must be at least 1, or -1"),
        ({"data": -1, "model": -1}, "data=-1 and model=-1: only one may be -1"),
        ({"tower": 3}, "3 must divide the number of devices, 8"),
        ({"data": 4, "tower": 4}, "takes 16 devices, and there are 8"),
        ({"data": 2, "devices": "all"}, "takes 2 devices, and there are 8"),
    ],
)
def test_sizes_that_the_devices_do_not_give(asked, message):
    if "devices" in asked:
        asked = asked | {"devices": jax.devices()}
    with pytest.raises(ValueError, match=message):
        make_mesh(**asked)


def test_one_process_has_all_rows():
    assert process_rows(make_mesh(), 16) == (0, 1)
    with pytest.raises(ValueError, match=r"data=2 × fsdp=4 must divide the batch of 12"):
        process_rows(make_mesh(data=2, fsdp=4), 12)
