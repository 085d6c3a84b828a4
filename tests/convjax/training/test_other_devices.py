"""A run goes on with another number of devices, and on another mesh, from the same numbers."""

import jax
import numpy as np
import pytest

from convjax.training.checkpoint import Checkpoints, Progress, read_checkpoint
from convjax.training.parts import assemble

pytestmark = pytest.mark.usefixtures("tiny_parts")

AT = 3
WIDE = {"model__fields": {"width": 1024}}  # from 2**14 numbers on, fsdp splits a kernel


def batch_and_step(parts, state, step):
    """The images of a step as each process gets them, and what it makes of a state."""
    batch = parts.train_data.batch(step)
    _, metrics = parts.train_step()(state, parts.layout.placed(batch))
    return batch["image"].tobytes(), {name: float(value) for name, value in metrics.items()}


@pytest.fixture(scope="module")
def saved(tiny_parts, make_config, tmp_path_factory):
    """A folder with a checkpoint that eight devices wrote, and what they make of it."""
    parts = assemble(make_config(**WIDE, mesh__data=4, mesh__fsdp=2))
    state, step = parts.initial_state(), parts.train_step()
    for index in range(AT):
        state, _ = step(state, parts.layout.placed(parts.train_data.batch(index)))
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    assert not state.params["hidden"]["kernel"].is_fully_replicated
    checkpoints = Checkpoints(directory, keep=1)
    checkpoints.save(state, Progress(step=AT, iterator={"next_index": AT}))
    checkpoints.close()
    values = jax.tree.map(np.asarray, state)
    return directory, values, batch_and_step(parts, state, AT)


@pytest.mark.parametrize(
    ("devices", "mesh"),
    [(2, {"data": 2}), (1, {"data": 1})],
)
def test_what_eight_devices_saved_goes_on_with(saved, make_config, devices, mesh):
    directory, values, (images, metrics) = saved
    config = make_config(**WIDE, **{f"mesh__{axis}": size for axis, size in mesh.items()})
    parts = assemble(config, devices=jax.devices()[:devices])
    state, progress = read_checkpoint(directory, AT, parts.abstract_state())
    for restored, value in zip(jax.tree.leaves(state), jax.tree.leaves(values), strict=True):
        assert len(restored.sharding.device_set) == devices
        assert np.asarray(restored).tobytes() == value.tobytes()
    next_images, next_metrics = batch_and_step(parts, state, progress.iterator["next_index"])
    assert next_images == images
    assert next_metrics == pytest.approx(metrics, rel=1e-6)
