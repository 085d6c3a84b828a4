"""metrics.jsonl and the TensorBoard events: what a continued run keeps, and what it cuts off."""

import errno
import json
from contextlib import closing

import pytest
from tensorboardX.proto import event_pb2

from convjax.training.errors import RunError
from convjax.training.metrics import MetricsWriter, read_metrics


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def write(path, steps, after_step=0):
    with closing(MetricsWriter(path, path.parent / "tensorboard", after_step)) as writer:
        for step in steps:
            writer.write({"step": step, "loss": step / 8})


def events(path):
    """Every event of every file, oldest file first: lengths and checksums frame each one."""
    found = []
    for file in sorted((path.parent / "tensorboard").iterdir(), key=lambda f: f.stat().st_mtime_ns):
        rest = file.read_bytes()
        while rest:
            length = int.from_bytes(rest[:8], "little")
            found.append(event_pb2.Event.FromString(rest[12 : 12 + length]))
            rest = rest[16 + length :]
    return found


def test_one_object_a_line(path):
    write(path, [1, 2])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": 0.125},
        {"step": 2, "loss": 0.25},
    ]
    assert read_metrics(path) == [{"step": 1, "loss": 0.125}, {"step": 2, "loss": 0.25}]


def test_records_are_readable_while_the_run_lasts(path):
    with closing(MetricsWriter(path, path.parent / "tensorboard", 0)) as writer:
        writer.write({"step": 1, "loss": 0.5})
        assert read_metrics(path) == [{"step": 1, "loss": 0.5}]


def test_a_continued_run_cuts_off_what_came_after_its_checkpoint(path):
    write(path, [2, 4, 6, 8])
    write(path, [6, 8], after_step=5)
    assert [record["step"] for record in read_metrics(path)] == [2, 4, 6, 8]
    write(path, [2], after_step=0)
    assert [record["step"] for record in read_metrics(path)] == [2]


def test_a_torn_last_line_is_no_record(path):
    write(path, [2, 4])
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    assert [record["step"] for record in read_metrics(path)] == [2, 4]
    write(path, [6], after_step=4)
    assert [record["step"] for record in read_metrics(path)] == [2, 4, 6]


def test_a_damaged_line_is_named(path):
    path.write_text("garbage\n")
    with pytest.raises(RunError, match=f"{path} is damaged"):
        read_metrics(path)


def test_events_hold_the_records_and_hide_what_was_cut_off(path):
    write(path, [2, 4])
    write(path, [4], after_step=3)
    scalars = [
        (event.step, value.tag, value.simple_value)
        for event in events(path)
        for value in event.summary.value
    ]
    assert scalars == [(2, "loss", 0.25), (4, "loss", 0.5), (4, "loss", 0.5)]
    started = [event.step for event in events(path) if event.HasField("session_log")]
    assert started == [1, 4]  # TensorBoard drops older events from these steps on
    assert all(event.wall_time > 1.6e9 for event in events(path))


def test_a_full_disk_is_named(path, monkeypatch):
    with closing(MetricsWriter(path, path.parent / "tensorboard", 0)) as writer:

        def refuse(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(writer._events, "flush", refuse)
        with pytest.raises(RunError, match=f"cannot write {path}: No space left on device"):
            writer.write({"step": 1, "loss": 0.5})
        monkeypatch.undo()


def test_an_unwritable_folder_is_named(path):
    (path.parent / "tensorboard").write_text("a file")
    with pytest.raises(RunError, match=r"cannot write .*tensorboard: File exists"):
        write(path, [])
