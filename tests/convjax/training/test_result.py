"""result.json: what it holds, and when it counts."""

import sys

import jax
import pytest

from convjax.training.result import Result, git_revision, peak_memory_bytes, versions


@pytest.fixture
def result():
    return Result(
        model="tiny",
        dataset="stripes",
        seed=0,
        steps=10,
        test_accuracy=0.1 + 0.2,
        test_loss=1e-17,
        best_step=5,
        best_test_accuracy=1.0,
        wall_seconds=3.5,
        images_per_second=7.0,
        parameters=188,
    )


def test_round_trip(tmp_path, result):
    result.write(tmp_path / "result.json")
    assert Result.read(tmp_path / "result.json") == result


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"model": "tiny"}'])
def test_what_cannot_be_read_is_no_result(tmp_path, content):
    path = tmp_path / "result.json"
    if content is not None:
        path.write_text(content)
    assert Result.read(path) is None


def test_versions_are_those_that_run():
    found = versions()
    assert found["jax"] == jax.__version__
    assert sys.version.startswith(found["python"])


def test_git_revision_is_a_commit_or_nothing():
    revision = git_revision()
    assert revision is None or len(revision.removesuffix("-dirty")) == 40


def test_peak_memory_is_in_bytes():
    assert 50e6 < peak_memory_bytes() < 1e12
