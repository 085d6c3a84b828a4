"""A run's folder belongs to one process and one config, and its files are whole or not there."""

import errno
import os
import re
import subprocess
import sys

import pytest

from convjax.training.config import MeshConfig, differing_fields
from convjax.training.errors import ConfigError, RunError
from convjax.training.workdir import Workdir, write_json


def test_claim_makes_the_folder_and_keeps_the_config(tmp_path, make_config):
    folder = Workdir(tmp_path / "a" / "b")
    config = make_config()
    with folder.claimed(config):
        folder.write_config(config)
    assert differing_fields(folder.read_config(), config) == []
    with folder.claimed(config):  # again, once it is free
        pass


def test_the_mesh_is_neither_kept_nor_a_reason_to_refuse(tmp_path, make_config):
    folder = Workdir(tmp_path)
    folder.write_config(make_config(mesh__data=4))
    with folder.claimed(make_config(mesh__data=2, mesh__fsdp=2)):
        pass
    assert '"mesh"' not in (tmp_path / "config.json").read_text()
    assert folder.read_config().mesh == MeshConfig()


def test_another_config_is_refused_by_the_fields_that_differ(tmp_path, make_config):
    folder = Workdir(tmp_path)
    folder.write_config(make_config())
    other = make_config(seed=5, optimiser__learning_rate=0.25)
    message = f"{tmp_path} holds a run with other values of optimiser.learning_rate, seed; "
    with pytest.raises(ConfigError, match=re.escape(message)), folder.claimed(other):
        pass
    assert folder.read_config().seed == 0


def test_a_second_process_is_refused_and_the_end_of_the_first_frees_the_folder(
    tmp_path, make_config
):
    program = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); "
    program += "print('locked', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"locked\n"
        with (
            pytest.raises(RunError, match=f"another process runs in {tmp_path}"),
            Workdir(tmp_path).claimed(make_config()),
        ):
            pass
        process.kill()
    with Workdir(tmp_path).claimed(make_config()):
        pass


def test_no_run_and_a_damaged_config_are_named(tmp_path):
    folder = Workdir(tmp_path)
    with pytest.raises(RunError, match=f"no run in {tmp_path}"):
        folder.read_config()
    (tmp_path / "config.json").write_text('{"seed": ')
    with pytest.raises(RunError, match=r"config.json is damaged: Expecting value"):
        folder.read_config()


@pytest.mark.parametrize("place", ["file/run", "file"])
def test_a_folder_that_cannot_be_made_is_named(tmp_path, make_config, place):
    (tmp_path / "file").write_text("")
    path = tmp_path / place
    with (
        pytest.raises(RunError, match=f"cannot write {path}: (Not a directory|File exists)"),
        Workdir(path).claimed(make_config()),
    ):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_named(tmp_path, make_config):
    tmp_path.chmod(0o500)
    with (
        pytest.raises(RunError, match=f"cannot write {tmp_path}: Permission denied"),
        Workdir(tmp_path).claimed(make_config()),
    ):
        pass


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "values.json"
    write_json(path, {"old": 1})

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(RunError, match=f"cannot write {path}: No space left on device"):
        write_json(path, {"new": 2})
    assert path.read_text() == '{\n  "old": 1\n}\n'
