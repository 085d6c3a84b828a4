"""Checkpoints come back to the bit, prove themselves whole, and survive what disks do."""

import errno
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore
from jax.sharding import NamedSharding, PartitionSpec

from convjax.sharding import make_mesh
from convjax.training import checkpoint
from convjax.training.checkpoint import (
    Checkpoints,
    Progress,
    read_checkpoint,
    read_newest,
    saved_steps,
)
from convjax.training.errors import RunError
from convjax.training.state import TrainState

PARAMS = {
    "conv": {
        "kernel": jax.random.normal(jax.random.key(0), (3, 3, 2, 5)),
        "bias": jnp.array([0.1, -0.0, 1e-42, 3.4e38], jnp.float32),
    },
    "half": jnp.array([0.1, -2.0], jnp.bfloat16),
    "flag": jnp.array([True, False]),
}


def state_at(step: int) -> TrainState:
    params = jax.tree.map(lambda leaf: leaf + leaf.dtype.type(step % 2), PARAMS)
    optimiser = optax.chain(optax.trace(0.9), optax.scale_by_schedule(lambda _: 1.0))
    return TrainState(
        step=jnp.int32(step),
        params=params,
        batch_stats={"norm": {"mean": jnp.arange(3.0) + step}},
        opt_state=optimiser.init(params),
    )


def progress_at(step: int, **changes) -> Progress:
    window = ({"loss": 0.1 + step, "accuracy": 1 / 3},)
    return Progress(step=step, iterator={"next_index": step}, window=window, **changes)


def save(directory: Path, *steps: int, keep: int = 9, **changes) -> None:
    checkpoints = Checkpoints(directory, keep=keep)
    for step in steps:
        checkpoints.save(state_at(step), progress_at(step, **changes))
    checkpoints.close()


def assert_equal_to_the_bit(one, other) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with checkpoints of steps 1, 2 and 3; copy it before damaging it."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    save(directory, 1, 2, 3)
    return directory


@pytest.fixture
def directory(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


LIKE = jax.eval_shape(lambda: state_at(0))


def test_comes_back_to_the_bit(saved):
    state, progress = read_checkpoint(saved, 2, LIKE)
    assert_equal_to_the_bit(state, state_at(2))
    assert isinstance(state.params["half"], jax.Array)
    assert progress == progress_at(2)


def test_newest_and_best_are_kept(tmp_path):
    directory = tmp_path / "checkpoints"
    save(directory, 10, 20, 30, keep=2, best_step=10)
    assert saved_steps(directory) == [10, 20, 30]
    save(directory, 40, keep=2, best_step=10)  # by a new process
    assert saved_steps(directory) == [10, 30, 40]
    save(directory, 50, keep=2, best_step=50)
    assert saved_steps(directory) == [40, 50]


def test_half_written_checkpoints_are_not_seen_and_are_cleared(directory):
    shutil.copytree(directory / "3", directory / "4.orbax-checkpoint-tmp")
    assert saved_steps(directory) == [1, 2, 3]
    save(directory, 4)
    assert sorted(path.name for path in directory.iterdir()) == ["1", "2", "3", "4"]


@pytest.mark.parametrize("devices", [1, 8])
def test_a_save_is_of_the_state_at_its_call(tmp_path, devices):
    """Memory that the next steps take over while Orbax writes in the background does not matter."""
    whole = NamedSharding(make_mesh(devices=jax.devices()[:devices]), PartitionSpec())
    split = NamedSharding(whole.mesh, PartitionSpec("data"))
    params = {"whole": jnp.ones((128, 1024)), "split": jnp.ones((512, 1024))}
    params = jax.device_put(params, {"whole": whole, "split": split})
    add_one = jax.jit(lambda params: jax.tree.map(lambda leaf: leaf + 1, params), donate_argnums=0)
    params = add_one(add_one(params))
    state = state_at(0).replace(params=params)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    checkpoints.save(state, progress_at(1))
    for _ in range(20):
        params = jax.block_until_ready(add_one(params))
    checkpoints.close()
    assert float(params["whole"][0, 0]) == 23
    restored, _ = read_checkpoint(tmp_path / "checkpoints", 1, LIKE.replace(params=params))
    assert all(np.all(np.asarray(leaf) == 3) for leaf in restored.params.values())


def test_no_checkpoint(tmp_path, saved):
    assert saved_steps(tmp_path / "nowhere") == []
    assert read_newest(tmp_path / "nowhere", lambda: LIKE, print) is None
    with pytest.raises(RunError, match=f"no checkpoint of step 7 in {saved}; there are: 1, 2, 3"):
        read_checkpoint(saved, 7, LIKE)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "truncated": truncate,
    "bit flipped": flip_a_bit,
    "deleted": Path.unlink,
    "emptied": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(b"\x93garbage\x00" * 50),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_any_file_is_noticed_or_harmless(directory, damage):
    """Some files only say again what others hold; what comes back must be right to the bit."""
    noticed = []
    for path in sorted((directory / "3").rglob("*")):
        if path.is_dir() or path.stat().st_size == 0:
            continue
        content = path.read_bytes()
        DAMAGES[damage](path)
        try:
            state, progress = read_checkpoint(directory, 3, LIKE)
        except RunError as error:
            noticed.append(str(error))
        else:
            assert_equal_to_the_bit(state, state_at(3))
            assert progress == progress_at(3)
        path.write_bytes(content)
    assert len(noticed) >= 3
    for message in noticed:
        assert message.startswith(f"checkpoint {directory / '3'} is damaged: ")
        assert "\n" not in message


def test_a_changed_number_in_the_progress_is_noticed(directory):
    path = directory / "3" / "progress" / "metadata"
    path.write_text(path.read_text().replace('"next_index": 3', '"next_index": 4'))
    with pytest.raises(RunError, match="the checksum differs"):
        read_checkpoint(directory, 3, LIKE)


def test_the_one_before_a_damaged_one_is_used(directory):
    (directory / "3" / "progress" / "metadata").unlink()
    lines = []
    state, progress = read_newest(directory, lambda: LIKE, lines.append)
    assert_equal_to_the_bit(state, state_at(2))
    assert progress.step == 2
    assert len(lines) == 1
    assert lines[0].startswith(f"checkpoint {directory / '3'} is damaged: ")
    assert lines[0].endswith("; continuing from step 2")
    assert saved_steps(directory) == [1, 2]
    assert (directory / "damaged-3" / "state").is_dir()
    save(directory, 3)  # the step is free again
    assert read_newest(directory, lambda: LIKE, lines.append)[1].step == 3


def test_two_damaged_ones_at_the_same_step_are_both_set_aside(directory):
    for _ in range(2):
        (directory / "3" / "progress" / "metadata").unlink()
        read_newest(directory, lambda: LIKE, lambda _: None)
        save(directory, 3)
    names = sorted(path.name for path in directory.iterdir())
    assert names == ["1", "2", "3", "damaged-3", "damaged-3-again"]


def test_damage_in_an_old_one_does_not_keep_a_run_from_going_on(directory):
    for path in (directory / "1").rglob("*"):
        if path.is_file():
            path.write_bytes(b"garbage")
    assert read_newest(directory, lambda: LIKE, pytest.fail)[1].step == 3
    save(directory, 4)
    assert saved_steps(directory) == [1, 2, 3, 4]


def test_all_damaged_is_an_error_that_touches_nothing(directory):
    for step in (1, 2, 3):
        (directory / str(step) / "progress" / "metadata").write_text("{")
    with pytest.raises(RunError, match=f"no checkpoint in {directory} is whole; .*/3 is damaged"):
        read_newest(directory, lambda: LIKE, pytest.fail)
    assert saved_steps(directory) == [1, 2, 3]


def test_a_checkpoint_of_another_network_is_refused(saved):
    other = LIKE.replace(params={"dense": jax.ShapeDtypeStruct((2,), jnp.float32)})
    with pytest.raises(RunError, match=f"checkpoint {saved / '3'} is damaged"):
        read_checkpoint(saved, 3, other)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_state_that_is_not_finite_is_not_saved(directory, value):
    checkpoints = Checkpoints(directory, keep=9)
    state = state_at(4)
    state = state.replace(batch_stats={"norm": {"mean": jnp.array([0.0, value, 0.0])}})
    with pytest.raises(RunError, match=r"batch_stats.norm.mean is not finite after step 4"):
        checkpoints.save(state, progress_at(4))
    checkpoints.close()
    assert saved_steps(directory) == [1, 2, 3]


def test_a_full_disk_is_named_and_keeps_what_was_saved(directory, monkeypatch, capfd):
    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints = Checkpoints(directory, keep=1)
    monkeypatch.setattr(tensorstore.TensorStore, "write", refuse)
    checkpoints.save(state_at(4), progress_at(4))
    message = f"cannot write {directory}: .*No space left on device.*checkpoints kept: 1, 2, 3"
    with pytest.raises(RunError, match=message):
        checkpoints.close()
    assert "Traceback" not in capfd.readouterr().err
    monkeypatch.undo()
    assert read_newest(directory, lambda: LIKE, pytest.fail)[1].step == 3


def test_a_failure_in_the_background_is_raised_by_the_next_check(directory, monkeypatch):
    checkpoints = Checkpoints(directory, keep=9)
    checkpoints.check()  # nothing to raise yet
    monkeypatch.setattr(
        checkpoint.ocp.CheckpointManager,
        "_finalize_checkpoint",
        lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")),
    )
    checkpoints.save(state_at(4), progress_at(4))
    with pytest.raises(RunError, match="Input/output error"):
        checkpoints.wait()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=f"cannot write {tmp_path / 'file' / 'checkpoints'}: "):
        Checkpoints(tmp_path / "file" / "checkpoints", keep=1)


def test_a_checkpoint_that_may_not_be_read_is_not_called_damaged(directory, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(checkpoint.ocp.CompositeCheckpointHandler, "restore", refuse)
    with pytest.raises(RunError, match=r"cannot read checkpoint .*3: .*Permission denied"):
        read_newest(directory, lambda: LIKE, print)
    assert saved_steps(directory) == [1, 2, 3]
