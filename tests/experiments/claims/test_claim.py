"""A claim's row is whole or absent, finished parts are kept, and a command says what is wrong."""

import json
import signal

import numpy as np
import pytest

from convjax.training.errors import RunError, StoppedError
from experiments.claims.claim import Claim, Measurement, Outcome, Task, main


def measure(task):
    part = task.part("one", {"preset": task.preset}, lambda: ({"seeds": task.seeds}, {}))
    return Measurement(
        measured=f"{part.values['seeds']} seeds of {task.options['source']}",
        holds="no",
        figures=("picture.png",),
    )


CLAIM = Claim(
    name="C99",
    script="c99_stub",
    title="two is three",
    expected="3",
    measure=measure,
    seeds=5,
    options={"source": "digits"},
)


@pytest.fixture
def task(tmp_path):
    return Task(folder=tmp_path, preset="cpu", seeds=1)


# rows


def test_row(tmp_path):
    outcome = CLAIM.run(tmp_path, "smoke")
    row = json.loads((tmp_path / "c99_stub.json").read_text())
    assert 0 <= row.pop("seconds") < 60
    assert row == {
        "claim": "C99",
        "title": "two is three",
        "expected": "3",
        "measured": "2 seeds of digits",
        "holds": "no",
        "figures": ["c99_stub/picture.png"],
    }
    assert Outcome.read(tmp_path / "c99_stub.json") == outcome


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"figures": []}', '{"claim": "C1"'])
def test_a_row_that_cannot_be_read_is_none(tmp_path, content):
    (tmp_path / "row.json").write_text(content)
    assert Outcome.read(tmp_path / "row.json") is None
    assert Outcome.read(tmp_path / "none.json") is None


def test_a_measurement_that_fails_leaves_no_row(tmp_path):
    def fail(task):
        raise RunError("no")

    claim = Claim(name="C99", script="c99_stub", title="", expected="", measure=fail)
    with pytest.raises(RunError, match="no"):
        claim.run(tmp_path)
    assert not (tmp_path / "c99_stub.json").exists()


def test_seeds_are_the_claims_own_few_in_a_smoke_run_or_as_asked_for(tmp_path):
    assert CLAIM.run(tmp_path, "cpu").measured == "5 seeds of digits"
    assert CLAIM.run(tmp_path, "smoke").measured == "2 seeds of digits"
    again = CLAIM.run(tmp_path / "other", "smoke", seeds=3, options={"source": "patches"})
    assert again.measured == "3 seeds of patches"


# parts


def test_a_finished_part_is_kept(task):
    calls = []

    def once(value):
        calls.append(value)
        return {"value": value}, {"filters": np.full(2, value, np.float32)}

    for value in (1, 2):
        part = task.part("a", {"steps": 3, "widths": (1, 2)}, lambda value=value: once(value))
        assert part.values == {"value": 1}
        assert part.arrays["filters"].tolist() == [1, 1]
        assert part.arrays["filters"].dtype == np.float32
    assert calls == [1]


def test_a_part_of_other_settings_or_presets_is_measured_anew(task, tmp_path):
    def part(task, steps, value):
        return task.part("a", {"steps": steps}, lambda: ({"value": value}, {})).values["value"]

    assert part(task, 3, 1) == 1
    smoke = Task(folder=tmp_path, preset="smoke", seeds=1)
    assert part(smoke, 3, 2) == 2
    assert part(task, 3, 3) == 1
    assert part(task, 4, 4) == 4
    assert part(task, 3, 5) == 5


def test_a_part_that_was_interrupted_or_damaged_is_measured_anew(task, tmp_path):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        task.part("a", {}, interrupted)
    assert task.finished("a", {}) is None
    for damage in ("a.npz", "a.json"):
        task.part("a", {}, lambda: ({}, {"x": np.zeros(3)}))
        assert task.finished("a", {}) is not None
        (tmp_path / "parts/cpu" / damage).write_text("{")
        assert task.finished("a", {}) is None
        (tmp_path / "parts/cpu" / damage).unlink()
        assert task.finished("a", {}) is None


def test_arrays_of_objects_are_refused_and_nothing_is_finished(task):
    with pytest.raises(ValueError, match="Object arrays"):
        task.part("a", {}, lambda: ({}, {"x": np.array([{}])}))
    assert task.finished("a", {}) is None


def test_seconds_count_what_earlier_processes_measured(task, tmp_path):
    task.part("a", {}, lambda: ({}, {}))
    path = tmp_path / "parts/cpu/a.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "seconds": 1000}))
    later = Task(folder=tmp_path, preset="cpu", seeds=1)
    assert later.finished("a", {}) is not None
    assert later.seconds() < 60
    later.part("a", {}, lambda: ({}, {}))
    assert 1000 <= later.seconds() < 1060


def test_a_signal_ends_the_task_where_it_looks(task):
    task.check_stop()
    task.stop.signal_number = signal.SIGTERM
    with pytest.raises(StoppedError, match="stopped by SIGTERM; finished parts are kept") as error:
        task.check_stop()
    assert error.value.signal_number == 15


# commands


def test_command(tmp_path, capsys):
    assert main(CLAIM, "doc", [f"--out={tmp_path}", "--preset=gpu", "--source=faces"]) == 0
    said = capsys.readouterr().out
    assert "C99, two is three: no. 5 seeds of faces" in said
    assert f"c99_stub/picture.png in {tmp_path}" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: --out must be given"),
        (["--out=x", "--preset=fast"], "argument --preset: invalid choice: 'fast'"),
        (["--out=x", "--seeds=0"], "error: --seeds=0 must be at least 1"),
        (["--out=x", "--seed=2"], "error: unknown argument --seed; the nearest is --seeds"),
    ],
)
def test_wrong_words(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as error:
        main(CLAIM, "doc", arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(CLAIM, "doc", [f"--out={tmp_path / 'file'}"]) == 1
    assert capsys.readouterr().err.startswith(f"error: cannot write {tmp_path}/file/c99_stub")
