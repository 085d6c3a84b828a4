"""Whole runs of a tiny network: continued, stopped, diverged, damaged, repeated."""

import errno
import json
import math
import shutil
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorstore

from convjax.data import Dataset
from convjax.training import loop, pictures
from convjax.training.checkpoint import Checkpoints, read_checkpoint, saved_steps
from convjax.training.errors import ConfigError, RunError, StoppedError
from convjax.training.evaluation import evaluate_run
from convjax.training.interruption import stop_requests
from convjax.training.loop import train
from convjax.training.metrics import read_metrics
from convjax.training.parts import assemble
from convjax.training.result import Result
from convjax.training.workdir import Workdir

TIMINGS = {"seconds", "images_per_second"}

pytestmark = pytest.mark.usefixtures("tiny_parts", "undrawn")


@pytest.fixture
def undrawn(request, monkeypatch):
    """Leave out the pictures, which take a second a run, unless a test is `drawn`."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(pictures, "draw_curves", lambda *_: None)
        monkeypatch.setattr(pictures, "draw_predictions", lambda *_: None)


@pytest.fixture
def drawn():
    """Ask for the pictures."""


def stop_at(monkeypatch, step: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Send this process a signal when the run asks for training batch `step`, counted from 0."""
    make = Dataset.iterator

    def iterator(self, **options):
        batches = make(self, **options)
        if not self.train:
            return batches
        take = type(batches).__next__

        class Stopping(type(batches)):
            def __next__(self):
                if self.get_state()["next_index"] == step:
                    signal.raise_signal(number)
                return take(self)

        batches.__class__ = Stopping
        return batches

    monkeypatch.setattr(Dataset, "iterator", iterator)


def final(workdir: Path):
    """Everything that must not depend on how often a run was stopped."""
    folder = Workdir(workdir)
    step = saved_steps(folder.checkpoints)[-1]
    like = assemble(folder.read_config()).abstract_state()
    state, progress = read_checkpoint(folder.checkpoints, step, like)
    records = [
        {name: value for name, value in record.items() if name not in TIMINGS}
        for record in read_metrics(folder.metrics)
    ]
    result = json.loads(folder.result.read_text())
    leaves = {
        jax.tree_util.keystr(path): (leaf.dtype, leaf.shape, np.asarray(leaf).tobytes())
        for path, leaf in jax.tree.leaves_with_path(state)
    }
    best = progress.best_step, progress.best_accuracy
    return leaves, progress.iterator, best, records, result["test_accuracy"], result["test_loss"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_parts, make_config):
    """The folder of a run that nothing disturbed, to look at only."""
    workdir = tmp_path_factory.mktemp("finished")
    train(make_config(), workdir)
    return workdir


@pytest.fixture(scope="module")
def whole(finished):
    """The end of a run that nothing disturbed."""
    return final(finished)


def test_a_run_leaves_what_it_says(tmp_path, make_config, capsys, drawn):
    result = train(make_config(), tmp_path)
    assert (result.model, result.dataset, result.steps, result.seed) == ("tiny", "stripes", 10, 0)
    assert result.parameters == (16 * 8 + 8) + 2 * 8 + (8 * 4 + 4)
    assert result.test_accuracy > 0.5
    assert result.wall_seconds > 0
    assert result.images_per_second > 0
    assert result.peak_memory_bytes > 1e7
    assert result.versions["jax"] == jax.__version__
    content = json.loads((tmp_path / "result.json").read_text())
    assert content["test_accuracy"] == result.test_accuracy
    names = {path.name for path in tmp_path.iterdir()}
    pictures = {"curves.png", "predictions.png"}
    assert names == {
        *(".lock", "config.json", "checkpoints", "metrics.jsonl", "tensorboard", "result.json"),
        *pictures,
    }
    for name in pictures:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records if "loss" in r] == [3, 6, 9, 10]
    assert [r["step"] for r in records if "test_loss" in r] == [5, 10]
    assert [r["epoch"] for r in records if "test_loss" in r] == [1, 2]
    output = capsys.readouterr().out
    assert "tiny (188 parameters) on stripes (70 images)" in output
    assert f"step 10: test accuracy {result.test_accuracy:.4f}" in output


def test_test_accuracy_counts_each_image_once(finished, make_config):
    """23 images in batches of 10: the last is padded with 7 that must not count."""
    result = Result.read(finished / "result.json")
    parts = assemble(make_config())
    state, _ = read_checkpoint(finished / "checkpoints", 10, parts.abstract_state())
    data, right, losses = parts.test_data, 0, []
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    for index in range(len(data.source)):
        example = data.source[index]
        images = (np.float32(example["image"][None]) / 255 - np.float32(0.4)) / np.float32(0.3)
        logits = np.asarray(parts.model.apply(variables, images, train=False), np.float64)[0]
        right += logits.argmax() == example["label"]
        losses.append(np.log(np.exp(logits).sum()) - logits[example["label"]])
    assert result.test_accuracy == right / 23
    assert result.test_loss == pytest.approx(np.mean(losses), rel=1e-5)


@pytest.mark.parametrize("steps", [(1, 2), (3, 4, 8)])
def test_stopped_and_continued_runs_are_bit_identical(
    tmp_path, make_config, monkeypatch, whole, steps
):
    """Stops at checkpoints, between them, amid a window of metrics, and at a measurement."""
    for step in steps:
        with monkeypatch.context() as patch:
            stop_at(patch, step)
            with pytest.raises(StoppedError, match=f"SIGTERM after step {step + 1} of 10, "):
                train(make_config(), tmp_path / "stopped")
    train(make_config(), tmp_path / "stopped")
    assert final(tmp_path / "stopped") == whole


def test_a_run_that_lost_its_last_checkpoints_is_bit_identical(tmp_path, make_config, whole):
    """As after a kill: there are records from after the checkpoint, the last of them torn."""
    workdir = tmp_path / "killed"
    train(make_config(keep_checkpoints=99), workdir)
    (workdir / "config.json").unlink()
    (workdir / "result.json").unlink()
    for step in saved_steps(workdir / "checkpoints"):
        if step > 4:
            (workdir / "checkpoints" / str(step)).rename(workdir / f"lost-{step}")
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "lo')
    train(make_config(), workdir)
    assert final(workdir) == whole


def test_a_run_killed_before_its_result_only_finishes(
    tmp_path, make_config, finished, whole, monkeypatch
):
    workdir = shutil.copytree(finished, tmp_path / "killed")
    (workdir / "result.json").unlink()
    monkeypatch.setattr(Checkpoints, "save", None)
    train(make_config(), workdir)
    assert final(workdir) == whole


def test_seeds_differ(tmp_path, make_config, whole):
    train(make_config(seed=1), tmp_path / "other")
    assert final(tmp_path / "other")[0] != whole[0]


def test_a_finished_run_is_only_told_again(finished, make_config, monkeypatch, capsys):
    monkeypatch.setattr(loop, "assemble", None)  # no work
    assert train(make_config(), finished) == Result.read(finished / "result.json")
    assert f"the run in {finished} is finished" in capsys.readouterr().out


def test_another_config_is_refused(finished, make_config):
    with pytest.raises(ConfigError, match=r"other values of optimiser\.momentum, seed; "):
        train(make_config(seed=3, optimiser__momentum=0.5), finished)


def test_wall_time_adds_up_over_the_pieces(tmp_path, make_config, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at(patch, 5)
        with pytest.raises(StoppedError):
            train(make_config(), tmp_path, started=loop.time.perf_counter() - 1000)
    assert 1000 < train(make_config(), tmp_path).wall_seconds < 1500


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_finishes_the_step_and_saves_it(tmp_path, make_config, monkeypatch, number):
    usual = signal.getsignal(number)
    stop_at(monkeypatch, 6, number)
    with pytest.raises(StoppedError, match="the same command continues") as caught:
        train(make_config(), tmp_path)
    assert caught.value.signal_number == number
    assert saved_steps(tmp_path / "checkpoints")[-1] == 7
    assert signal.getsignal(number) is usual


@pytest.fixture
def interruptible():
    """Ctrl-C as in a terminal: a shell's background jobs, and so some CI runs, ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_second_signal_acts_as_usual(interruptible):
    def interrupt():
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.01)  # Python handles signals between two instructions

    with stop_requests() as stop:
        interrupt()
        assert stop.signal_number == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            interrupt()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimiser__learning_rate": 1e38, "schedule": {}}, r"is (nan|inf) at step (\d+);"),
        ({"data__std": (1e-45,)}, r"is (nan|inf) at step (1);"),
    ],
)
def test_a_run_that_diverges_stops_at_the_step(tmp_path, make_config, changes, message):
    changes = {"log_every_steps": 1, "checkpoint_every_steps": 1, **changes}
    with pytest.raises(RunError, match=message) as caught:
        train(make_config(**changes), tmp_path)
    step = int(str(caught.value).partition("at step ")[2].partition(";")[0])
    for saved in saved_steps(tmp_path / "checkpoints"):
        assert saved < step
        like = assemble(make_config(**changes)).abstract_state()
        state, _ = read_checkpoint(tmp_path / "checkpoints", saved, like)
        assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(state))
    assert not (tmp_path / "result.json").exists()


def test_the_step_that_diverged_is_named_also_between_two_records(
    tmp_path, make_config, monkeypatch
):
    """Only the host's look is late: the step's number is its own."""
    make = loop.Parts.train_step

    def train_step(self):
        step = make(self)

        class Poisoned:
            def lower(self, *arguments):
                compiled = step.lower(*arguments).compile()

                def call(state, batch):
                    new_state, metrics = compiled(state, batch)
                    if int(new_state.step) == 5:
                        metrics = {**metrics, "gradient_norm": np.float32(math.inf)}
                    return new_state, metrics

                self.compile = lambda: call
                return self

        return Poisoned()

    monkeypatch.setattr(loop.Parts, "train_step", train_step)
    config = make_config(log_every_steps=9, checkpoint_every_steps=4, eval_every_epochs=9)
    with pytest.raises(RunError, match="gradient_norm is inf at step 5; the checkpoints from befo"):
        train(config, tmp_path)
    assert saved_steps(tmp_path / "checkpoints") == [4]


def test_a_damaged_newest_checkpoint_is_told_and_the_one_before_it_used(
    tmp_path, make_config, monkeypatch, whole, capsys
):
    workdir = tmp_path / "damaged"
    with monkeypatch.context() as patch:
        stop_at(patch, 6)
        with pytest.raises(StoppedError):
            train(make_config(), workdir)
    newest = workdir / "checkpoints" / "7"
    for path in newest.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:40])
    capsys.readouterr()
    train(make_config(), workdir)
    lines = [line for line in capsys.readouterr().out.splitlines() if "damaged" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"checkpoint {newest} is damaged: ")
    assert lines[0].endswith("continuing from step 5")
    assert final(workdir) == whole


def test_a_full_disk_stops_the_run_and_keeps_what_was_saved(tmp_path, make_config, monkeypatch):
    save = Checkpoints.save

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    def save_on_a_full_disk(self, state, progress):
        if progress.step == 8:
            self.wait()
            monkeypatch.setattr(tensorstore.TensorStore, "write", refuse)
        save(self, state, progress)

    monkeypatch.setattr(Checkpoints, "save", save_on_a_full_disk)
    message = r"cannot write .*checkpoints: .*No space left.*checkpoints kept: 4, 5$"
    with pytest.raises(RunError, match=message):
        train(make_config(keep_checkpoints=9), tmp_path)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model__name": "tinny"}, ConfigError, "model: unknown model 'tinny'; nearest: tiny"),
        ({"model__fields": {"wdth": 3}}, ConfigError, "model: .*wdth"),
        ({"data__name": "dots"}, RunError, "no set dots in None; make it"),
        (
            {"data__mean": (0.1, 0.2), "data__std": (1, 1)},
            ConfigError,
            r"data.mean=\(0.1, 0.2\) must have one value for each of 1 channels",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_the_folder_free(
    tmp_path, make_config, changes, error, message
):
    with pytest.raises(error, match=message):
        train(make_config(**changes), tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_measuring_a_checkpoint_again(finished, make_config):
    result = Result.read(finished / "result.json")
    records = read_metrics(finished / "metrics.jsonl")
    by_step = {r["step"]: r["test_accuracy"] for r in records if "test_accuracy" in r}
    before = sorted(path.name for path in finished.iterdir())
    source = assemble(make_config()).test_data.source
    test_source = [source[index] for index in range(23)]
    for checkpoint, step in [("latest", 10), ("best", result.best_step), ("10", 10)]:
        found_step, evaluation = evaluate_run(finished, checkpoint)
        assert (found_step, evaluation.accuracy) == (step, by_step[step])
        hits = evaluation.predictions == [example["label"] for example in test_source]
        assert hits.mean() == evaluation.accuracy
    assert evaluate_run(finished, "8")[0] == 8
    assert result.best_test_accuracy == max(by_step.values())
    assert sorted(path.name for path in finished.iterdir()) == before
    with pytest.raises(RunError, match="no checkpoint of step 7 in"):
        evaluate_run(finished, "7")


def test_measuring_nothing(tmp_path, make_config):
    with pytest.raises(RunError, match=f"no run in {tmp_path}"):
        evaluate_run(tmp_path)
    Workdir(tmp_path).write_config(make_config())
    with pytest.raises(RunError, match=f"no checkpoint in {tmp_path / 'checkpoints'}"):
        evaluate_run(tmp_path)
