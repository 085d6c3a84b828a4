"""The two commands: words in, one line and an exit status out."""

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from convjax.training import evaluation, loop
from convjax.training.errors import RunError, StoppedError
from experiments import evaluate, train

ROOT = Path(__file__).parents[2]
CONFIG = """
from ml_collections import ConfigDict

def get_config():
    data = {"name": "digits", "batch_size": 32, "mean": (0.3,), "std": (0.4,)}
    return ConfigDict({"model": {"name": "resnet8_cifar"}, "data": data, "epochs": 1})
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def asked(monkeypatch):
    """What the loop was asked for; nothing is trained."""
    calls = []

    class FakeResult:
        test_accuracy, steps, wall_seconds = 0.87654, 45, 12.34

    def note(config, workdir, *, started):
        calls.append((config, workdir))
        return FakeResult

    monkeypatch.setattr(loop, "train", note)
    return calls


def status_of(main, arguments) -> int:
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as end:
        return int(end.code)


def test_the_last_line_names_accuracy_time_and_folder(config, asked, tmp_path, capsys):
    assert status_of(train.main, [f"--config={config}", f"--workdir={tmp_path}/run"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"test accuracy 0.8765 after 45 steps in 12.3 s, in {tmp_path}/run"


def test_both_forms_of_flags(config, asked):
    one = "--config=FILE --workdir=run --config.seed=3 --config.data.data_dir=-x"
    two = "--config FILE --config.seed 3 --workdir run --config.data.data_dir -x"
    forms = [form.replace("FILE", str(config)).split() for form in (one, two)]
    assert [status_of(train.main, form) for form in forms] == [0, 0]
    (one, workdir), other = asked
    assert (one, workdir) == other
    assert (one.seed, one.data.data_dir, workdir) == (3, "-x", "run")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--confg=a.py --workdir=run",
            "unknown argument --confg; the nearest is --config",
        ),
        (
            "--config=FILE --wrkdir run",
            "unknown argument --wrkdir; the nearest is --workdir",
        ),
        (
            "--config=FILE --work=run",
            "unknown argument --work; the nearest is --workdir",
        ),
        ("--config=FILE", "--workdir must be given"),
        ("--workdir=run", "--config must be given"),
        ("--config=FILE --workdir=run --config.seed", "--config.seed needs a value"),
        ("--config=FILE --workdir=run --config.sed=3", "unknown field sed; the nearest is seed"),
        ("--config=FILE --workdir=run --config.seed=a", "seed='a' must be an integer"),
        ("--config=none.py --workdir=run", "no config file none.py"),
        (
            "--config=FILE --workdir=run --coordinator=a:1 --processes=2",
            "--coordinator, --processes and --process_id go together",
        ),
        (
            "--config=FILE --workdir=run --coordinator=a:1 --processes=2 --process_id=2",
            "--process_id=2 must be in [0, 2)",
        ),
    ],
)
def test_wrong_words_are_one_line_and_status_2(config, asked, capfd, words, message):
    arguments = words.replace("FILE", str(config)).split()
    assert status_of(train.main, arguments) == 2
    output, errors = capfd.readouterr()
    assert (output, errors) == ("", f"error: {message}\n")
    assert asked == []


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (RunError("loss is nan\nat step 3"), 1, "error: loss is nan at step 3\n"),
        (StoppedError("stopped by SIGTERM", 15), 143, "stopped by SIGTERM\n"),
        (StoppedError("stopped by SIGINT", 2), 130, "stopped by SIGINT\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (PermissionError(13, "Denied", "a.gz"), 1, "error: [Errno 13] Denied: 'a.gz'\n"),
    ],
)
def test_ends_of_a_run(config, monkeypatch, capsys, error, status, line):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(loop, "train", fail)
    assert status_of(train.main, ["--config", config, "--workdir", "run"]) == status
    assert capsys.readouterr().err == line


def test_mistakes_in_the_code_keep_their_traceback(config, monkeypatch):
    monkeypatch.setattr(loop, "train", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train.main([f"--config={config}", "--workdir=run"])


def test_evaluate_takes_a_name_or_a_step(monkeypatch, capsys):
    asked = []

    class FakeEvaluation:
        accuracy, loss, predictions = 0.5, 1.25, range(2000)

    def note(workdir, checkpoint):
        asked.append((workdir, checkpoint))
        return 78, FakeEvaluation

    monkeypatch.setattr(evaluation, "evaluate_run", note)
    for checkpoint in (["--checkpoint=best"], ["--checkpoint", "30"], []):
        assert status_of(evaluate.main, ["--workdir=run", *checkpoint]) == 0
    assert asked == [("run", "best"), ("run", "30"), ("run", "latest")]
    line = "test accuracy 0.5000, test loss 1.2500 on 2,000 images, step 78, in run"
    assert capsys.readouterr().out.splitlines()[-1] == line


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("--workdir=none", 1, "no run in none: no file none/config.json"),
        ("", 2, "--workdir must be given"),
        ("--workdr=none", 2, "unknown argument --workdr; the nearest is --workdir"),
        ("--workdir=none --checkpoint=bst", 2, "--checkpoint=bst must be best, latest or a step"),
    ],
)
def test_evaluate_refuses_in_one_line(capsys, words, status, message):
    assert status_of(evaluate.main, words.split()) == status
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize("module", ["experiments.train", "experiments.evaluate"])
def test_help_and_wrong_flags_do_not_wait_for_jax(module):
    program = "import runpy, sys; sys.argv = ['x', sys.argv[1]]\n"
    program += f"try: runpy.run_module('{module}', run_name='__main__')\n"
    program += "except SystemExit as end: print('jax' in sys.modules, end.code)"
    for flag, status in (("--help", 0), ("--wrong", 2)):
        done = subprocess.run(
            [sys.executable, "-c", program, flag], cwd=ROOT, capture_output=True, text=True
        )
        assert done.stdout.splitlines()[-1] == f"False {status}"


def test_an_empty_workdir_is_no_workdir(config, asked, capsys):
    assert status_of(train.main, [f"--config={config}", "--workdir="]) == 2
    assert capsys.readouterr().err == "error: --workdir must be given\n"
    assert not asked


def test_an_unreadable_image_ends_a_run_in_one_line(tmp_path, capsys):
    for split in ("train", "test"):
        for label in ("cat", "dog"):
            folder = tmp_path / "pictures" / split / label
            folder.mkdir(parents=True)
            for index in range(4):
                Image.new("RGB", (8, 8), (index * 40, 90, 9)).save(folder / f"{index}.png")
    (tmp_path / "pictures/train/dog/3.png").write_bytes(b"not a picture")
    config = tmp_path / "config.py"
    config.write_text(f"""
from ml_collections import ConfigDict

def get_config():
    data = {{"name": "folder:{tmp_path}/pictures", "batch_size": 3, "test_batch_size": 8}}
    data |= {{"mean": (0.5,) * 3, "std": (0.25,) * 3, "augmentation": {{"crop": 8}}}}
    model = {{"name": "resnet8_cifar", "fields": {{"widths": (2, 2, 2)}}}}
    return ConfigDict({{"model": model, "data": data, "mesh": {{"data": 1}}, "epochs": 2}})
""")
    assert status_of(train.main, [f"--config={config}", f"--workdir={tmp_path}/run"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: images of ")
    assert "dog/3.png is not a readable image" in error
