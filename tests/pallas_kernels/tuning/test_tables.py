"""Tables lose nothing to other writers, kills or damage, and a disk that refuses only warns."""

import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from pallas_kernels.tuning import tables
from pallas_kernels.tuning.tables import TuningWarning

DRAWS = int(os.environ.get("CONVJAX_DRAWS", "5"))

posix = pytest.mark.skipif(sys.platform == "win32", reason="kills and locks are those of POSIX")

# Children load the module from its file: importing its package would import jax.
CHILD = f"""
import importlib.util, os, signal, sys
from pathlib import Path

spec = importlib.util.spec_from_file_location("tables", {tables.__file__!r})
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)
path = Path(sys.argv[1])
answer = {{"backend": "xla", "algorithm": None, "blocks": None, "seconds": 1.0}}
"""


def child(path, program, *arguments, **options):
    """A new process that runs `program` with `tables`, the table's `path` and an `answer`."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", CHILD + textwrap.dedent(program), path, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def answer(**fields):
    blocks = {"m": 64, "n": 128, "k": 32}
    standard = {"backend": "triton", "algorithm": "implicit", "blocks": blocks, "seconds": 2.5e-4}
    return standard | fields


def file_of(**fields):
    """The text of a file that is no table."""
    return json.dumps({"format": tables.FORMAT, "entries": {}} | fields)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tuning" / "nvidia-h200.json"


def names(path):
    return sorted(file.name for file in path.parent.iterdir())


def test_what_is_written_is_read(path):
    assert tables.read(path) == {}
    assert tables.write(path, {"q": answer(), "r": answer(blocks=None, algorithm=None)})
    assert tables.write(path, {"q": answer(seconds=1), "s": answer(tried=[1, None, {"a": "β"}])})
    assert tables.read(path) == {
        "q": answer(seconds=1),
        "r": answer(blocks=None, algorithm=None),
        "s": answer(tried=[1, None, {"a": "β"}]),
    }
    assert names(path) == ["nvidia-h200.json", "nvidia-h200.json.lock"]


texts = st.text('aZ5"\\/\n\0é×龙', max_size=5)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda value: st.lists(value, max_size=3) | st.dictionaries(texts, value, max_size=3),
    max_leaves=5,
)
answers = st.builds(
    lambda extra, needed: extra | needed,
    st.dictionaries(texts, values, max_size=2),
    st.fixed_dictionaries(
        {
            "backend": st.sampled_from(["xla", "triton"]),
            "algorithm": st.none() | texts,
            "blocks": st.none() | st.dictionaries(texts, st.integers(), max_size=3),
            "seconds": st.floats(0, exclude_min=True, allow_infinity=False) | st.integers(1, 9),
        }
    ),
)


@hypothesis.settings(max_examples=DRAWS)
@hypothesis.given(st.dictionaries(texts, answers, max_size=8), st.data())
def test_the_same_entries_are_the_same_bytes(entries, data):
    shuffled = data.draw(st.permutations(list(entries)))
    cut = data.draw(st.integers(0, len(shuffled)))
    with tempfile.TemporaryDirectory() as folder:
        whole, parts = Path(folder, "whole.json"), Path(folder, "parts.json")
        assert tables.write(whole, entries)
        for questions in (shuffled[:cut], shuffled[cut:]):
            part = {question: dict(reversed(entries[question].items())) for question in questions}
            assert tables.write(parts, part)
        assert tables.read(whole) == entries
        assert whole.read_bytes() == parts.read_bytes()
        assert whole.read_bytes().endswith(b"}\n")


def test_a_table_is_one_entry_a_line(path):
    shortest = {"backend": "xla", "algorithm": None, "blocks": None, "seconds": 2}
    assert tables.write(path, {"r": shortest, "q": shortest | {"shape": (1,)}})
    assert path.read_text() == textwrap.dedent("""\
        {
          "format": 1,
          "entries": {
            "q": {"algorithm": null, "backend": "xla", "blocks": null, "seconds": 2, "shape": [1]},
            "r": {"algorithm": null, "backend": "xla", "blocks": null, "seconds": 2}
          }
        }
        """)


GOOD = json.dumps({"format": tables.FORMAT, "entries": {"q": answer()}})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "Expecting value"),
        (b"not JSON", "Expecting value"),
        *((GOOD[:length].encode(), "") for length in (1, 11, 40, 80, len(GOOD) - 1)),
        (GOOD.encode() + b"}", "Extra data"),
        (b"\x80\xff", "codec can't decode|invalid"),
        (b"[" * 100_000, "recursion"),
        (b"[]", r"\[\] is no table"),
        (b"{}", "format=None must be 1"),
        (file_of(format=2).encode(), "format=2 must be 1"),
        (file_of(format=True).encode(), "format=True must be 1"),
        (file_of(format="1").encode(), "format='1' must be 1"),
        (file_of(entries=[]).encode(), r"entries=\[\] must be an object"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_damaged_file_is_reported_once_and_rebuilt(path, content, reason):
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.warns(TuningWarning, match=reason) as caught:
        assert tables.read(path) == {}
    (warning,) = caught
    assert str(path) in str(warning.message)
    assert "it counts as empty; it will be rebuilt" in str(warning.message)
    assert tables.read(path) == {}
    assert tables.write(path, {"r": answer()})
    assert tables.read(path) == {"r": answer()}


def test_a_writer_that_finds_the_damage_reports_it(path):
    path.parent.mkdir()
    path.write_text(GOOD[:-5])
    with pytest.warns(TuningWarning, match="it is rebuilt now"):
        assert tables.write(path, {"r": answer()})
    assert tables.read(path) == {"r": answer()}


BAD = [
    (3, "3 is no object"),
    ({}, "backend is missing"),
    ({key: value for key, value in answer().items() if key != "blocks"}, "blocks is missing"),
    (answer(backend="interpret"), "backend='interpret' must be 'xla' or 'triton'"),
    (answer(backend=["xla"]), r"backend=\['xla'\] must be"),
    (answer(algorithm=1), "algorithm=1 must be a string or null"),
    (answer(blocks=[64, 64]), r"blocks=\[64, 64\] must be whole numbers by name, or null"),
    (answer(blocks={"m": 64.0}), r"blocks=\{'m': 64.0\} must be"),
    (answer(blocks={"m": True}), r"blocks=\{'m': True\} must be"),
    (answer(seconds=0), "seconds=0 must be a positive number"),
    (answer(seconds=-1e-3), "seconds=-0.001 must be"),
    (answer(seconds=float("nan")), "seconds=nan must be"),
    (answer(seconds=float("inf")), "seconds=inf must be"),
    (answer(seconds=10**400), "seconds=1000.* must be"),
    (answer(seconds=True), "seconds=True must be"),
    (answer(seconds="1"), "seconds='1' must be"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD, ids=[reason for _, reason in BAD])
def test_a_bad_entry_is_reported_once_and_dropped(path, bad, reason):
    path.parent.mkdir()
    path.write_text(file_of(entries={"a": answer(), "b": bad, "c": answer(new=1), "d": bad}))
    whole = {"a": answer(), "c": answer(new=1)}
    with pytest.warns(TuningWarning, match=f"2 of 4 entries, as that of 'b': {reason}") as caught:
        assert tables.read(path) == whole
    (warning,) = caught
    assert "these count as absent; it will be rebuilt" in str(warning.message)
    assert tables.read(path) == whole
    assert tables.write(path, {"d": answer()})
    assert tables.read(path) == whole | {"d": answer()}
    assert set(json.loads(path.read_text())["entries"]) == {"a", "c", "d"}


@pytest.mark.parametrize(("bad", "reason"), BAD[1:], ids=[reason for _, reason in BAD[1:]])
def test_a_bad_entry_is_not_written(path, bad, reason):
    with pytest.raises(ValueError, match=f"the answer to 'q' is none: {reason}"):
        tables.write(path, {"q": bad})
    assert not path.parent.exists()


def test_what_json_has_no_form_for_is_not_written(path):
    with pytest.raises(TypeError, match="set"):
        tables.write(path, {"q": answer(tried={1})})
    assert not path.parent.exists()


@posix
def test_eight_processes_lose_nothing(path):
    program = """
    print("ready", flush=True)
    sys.stdin.read()
    for entry in range(25):
        assert tables.write(path, {f"{sys.argv[2]}/{entry}": answer})
    """
    with contextlib.ExitStack() as all_of_them:
        writers = [
            all_of_them.enter_context(child(path, program, str(writer), stdin=subprocess.PIPE))
            for writer in range(8)
        ]
        for writer in writers:
            assert writer.stdout
            assert writer.stdout.readline() == "ready\n"
        for writer in writers:
            assert writer.stdin
            writer.stdin.close()
    assert [writer.returncode for writer in writers] == [0] * 8
    expected = {f"{writer}/{entry}" for writer in range(8) for entry in range(25)}
    assert set(tables.read(path)) == expected
    assert names(path) == ["nvidia-h200.json", "nvidia-h200.json.lock"]


def test_threads_lose_nothing(path):
    def work(writer):
        for entry in range(10):
            assert tables.write(path, {f"{writer}/{entry}": answer()})

    threads = [threading.Thread(target=work, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tables.read(path)) == 40


@posix
def test_a_kill_at_any_time_loses_nothing_that_was_written(path):
    first = {f"first/{entry}": answer() for entry in range(300)}
    assert tables.write(path, first)
    written = set(first)
    for kill in range(8):
        program = """
        for entry in range(100_000):
            question = f"{sys.argv[2]}/{entry}"
            assert tables.write(path, {question: answer})
            print(question, flush=True)
        """
        with child(path, program, str(kill)) as writer:
            assert writer.stdout
            written.add(writer.stdout.readline().strip())
            end = time.monotonic() + random.uniform(0, 0.1)
            while time.monotonic() < end:
                assert written <= set(tables.read(path))  # a warning would be an error
            writer.kill()
            written.update(writer.stdout.read().split())
        assert writer.returncode == -signal.SIGKILL
        assert written <= set(tables.read(path))
    assert len(written) > 308
    assert tables.write(path, {"last": answer()})  # the lock of the last killed is free
    assert names(path) == ["nvidia-h200.json", "nvidia-h200.json.lock"]


@posix
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_killed_writers_file_is_removed_by_the_next(path, step):
    assert tables.write(path, {"q": answer()})
    before = path.read_bytes()
    program = """
    setattr(os, sys.argv[2], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    tables.write(path, {"r": answer})
    """
    with child(path, program, step) as writer:
        assert writer.wait(60) == -signal.SIGKILL
    assert path.read_bytes() == before
    assert len(names(path)) == 3
    assert tables.write(path, {"s": answer()})
    assert tables.read(path) == {"q": answer(), "s": answer()}
    assert names(path) == ["nvidia-h200.json", "nvidia-h200.json.lock"]


@posix
def test_a_writers_own_children_do_not_keep_its_lock(path):
    program = """
    tables.PATIENCE, replace, forked = 0.1, os.replace, []

    def fork(*paths):
        forked.append(os.fork())
        if not forked[0]:
            signal.pause()
        replace(*paths)

    os.replace = fork
    assert tables.write(path, {"q": answer})
    os.replace = replace
    try:
        assert tables.write(path, {"r": answer})
    finally:
        os.kill(forked[0], signal.SIGKILL)
    """
    with child(path, program) as writer:
        assert writer.wait(60) == 0


@posix
def test_a_writer_that_is_stopped_holds_others_up_for_so_long(path, monkeypatch):
    monkeypatch.setattr(tables, "PATIENCE", 0.1)
    program = """
    os.replace = lambda *_: (print("stopped", flush=True), signal.pause())
    tables.write(path, {"r": answer})
    """
    with child(path, program) as writer:
        assert writer.stdout
        assert writer.stdout.readline() == "stopped\n"
        with pytest.warns(TuningWarning, match=r"another process holds .*\.lock for 0\.1 s"):
            assert not tables.write(path, {"s": answer()})
        writer.kill()
    assert tables.write(path, {"s": answer()})
    assert tables.read(path) == {"s": answer()}


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_only_warns_once(path, monkeypatch, step):
    assert tables.write(path, {"q": answer()})
    before = path.read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        with pytest.warns(TuningWarning, match="cannot be written .*No space left") as caught:
            assert not tables.write(path, {"r": answer()})
        assert not tables.write(path, {"r": answer()})
    assert len(caught) == 1
    assert path.read_bytes() == before
    assert names(path) == ["nvidia-h200.json", "nvidia-h200.json.lock"]
    assert tables.write(path, {"r": answer()})
    assert tables.read(path) == {"q": answer(), "r": answer()}


@posix
def test_a_disk_that_is_full_in_mid_write_only_warns(path):
    assert tables.write(path, {"q": answer()})
    before = path.read_bytes()
    program = """
    import resource, warnings

    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # of a file, in bytes
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not tables.write(path, {str(entry): answer for entry in range(300)})
    assert [warning.category for warning in caught] == [tables.TuningWarning]
    """
    with child(path, program) as writer:
        assert writer.wait(60) == 0
    assert path.read_bytes() == before
    assert names(path) == ["nvidia-h200.json", "nvidia-h200.json.lock"]


def test_an_interrupt_leaves_the_old_table_and_no_other_file(path, monkeypatch):
    assert tables.write(path, {"q": answer()})

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tables.write(path, {"r": answer()})
    assert tables.read(path) == {"q": answer()}
    assert names(path) == ["nvidia-h200.json", "nvidia-h200.json.lock"]
    assert tables.write(path, {"r": answer()})


def test_a_folder_that_cannot_be_made_only_warns_once(tmp_path):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "tuning" / "cpu.json"
    assert tables.read(path) == {}
    with pytest.warns(TuningWarning, match=r"cpu\.json cannot be written") as caught:
        assert not tables.write(path, {"q": answer()})
    assert not tables.write(path, {"q": answer()})
    assert len(caught) == 1


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="binds no root")
def test_a_read_only_folder_only_warns(path):
    assert tables.write(path, {"q": answer()})
    path.parent.chmod(0o500)
    with pytest.warns(TuningWarning, match="Permission denied"):
        assert not tables.write(path, {"r": answer()})
    path.parent.chmod(0o700)
    assert tables.read(path) == {"q": answer()}


def test_a_file_that_cannot_be_read_is_left_alone(path, monkeypatch):
    assert tables.write(path, {"q": answer()})

    def refuse(_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        with pytest.warns(TuningWarning, match=r"cannot be read .*Too many open files") as caught:
            assert tables.read(path) == {}
        assert tables.read(path) == {}
        assert len(caught) == 1
        with pytest.warns(TuningWarning, match="cannot be written .*Too many open files"):
            assert not tables.write(path, {"r": answer()})
    assert tables.read(path) == {"q": answer()}


@pytest.fixture
def home(tmp_path, monkeypatch):
    for name in ("CONVJAX_TUNING", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("platform", "place"),
    [("linux", ".cache"), ("darwin", "Library/Caches"), ("win32", "AppData/Local")],
)
def test_tables_are_in_the_platforms_folder_for_caches(home, monkeypatch, platform, place):
    monkeypatch.setattr(sys, "platform", platform)
    assert tables.folder() == home / place / "convjax" / "tuning"


def test_the_environment_names_the_folder(home, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert tables.folder() == home / ".cache" / "convjax" / "tuning"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "xdg"))
    assert tables.folder() == home / "xdg" / "convjax" / "tuning"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(home / "local"))
    assert tables.folder() == home / "local" / "convjax" / "tuning"
    monkeypatch.setenv("CONVJAX_TUNING", "~/tuned")
    assert tables.folder() == home / "tuned"
    assert tables.path_of("cpu") == home / "tuned" / "cpu.json"


@pytest.mark.parametrize("word", ["off", "OFF"])
def test_off_means_no_table(home, monkeypatch, word):
    monkeypatch.setenv("CONVJAX_TUNING", word)
    assert tables.folder() is None
    assert tables.path_of("NVIDIA H200") is None


def test_without_a_home_there_is_no_table(home, monkeypatch):
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it does where there is none
    assert tables.folder() is None
    assert tables.path_of("cpu") is None


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H200", "nvidia-h200.json"),
        ("NVIDIA A100-SXM4-40GB", "nvidia-a100-sxm4-40gb.json"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", "intel-r-xeon-r-cpu-2.20ghz.json"),
        ("../../etc/passwd", "etc-passwd.json"),
        ("cpu", "cpu.json"),
    ],
)
def test_a_kind_of_device_names_its_file(home, kind, name):
    path = tables.path_of(kind)
    assert path is not None
    assert path.name == name


def test_any_kind_of_device_has_a_file_of_its_own(home):
    kinds = ["", "..", "ß", "龙芯 3A5000", "3A5000", "x" * 300, "x" * 301, "\ud800"]
    found = [tables.path_of(kind) for kind in kinds]
    assert len({path.name for path in found if path}) == len(kinds)
    for path in found:
        assert path is not None
        assert tables.write(path, {"q": answer()})


def test_a_shipped_table_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tables.resources, "files", lambda package: tmp_path)
    assert tables.shipped("NVIDIA H200") == {}
    table = tmp_path / "shipped" / "nvidia-h200.json"
    assert tables.write(table, {"q": answer()})
    assert tables.shipped("NVIDIA H200") == {"q": answer()}
    assert tables.shipped("NVIDIA L4") == {}
    table.write_text("{")
    with pytest.warns(TuningWarning, match="is damaged .* convjax should be installed again"):
        assert tables.shipped("NVIDIA H200") == {}
    assert tables.shipped("NVIDIA H200") == {}


def test_shipped_tables_are_whole():
    assert tables.shipped("no such device") == {}
    for table in (Path(tables.__file__).parent / "shipped").glob("*.json"):
        entries = tables.read(table)  # a warning would be an error
        assert entries
        assert tables.shipped(table.stem) == entries


def test_nothing_happens_at_import(tmp_path):
    program = f"""
import os, sys

def hook(event, arguments):
    writes = event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)
    if writes or event in ("os.mkdir", "socket.connect", "subprocess.Popen"):
        sys.exit(f"{{event}} {{arguments}}")

sys.addaudithook(hook)
{CHILD}
assert "jax" not in sys.modules
"""
    subprocess.run([sys.executable, "-B", "-c", program, tmp_path / "cpu.json"], check=True)
