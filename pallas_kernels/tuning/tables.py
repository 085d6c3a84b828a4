"""What a tuner found out, on disk: one table a kind of device.

    ~/.cache/convjax/tuning/nvidia-h200.json

    {
      "format": 1,
      "entries": {
        "QUESTION": {"algorithm": null, "backend": "triton", "blocks": {"k": 32, …}, "seconds": …},
        …
      }
    }

A question is a string; its answer has at least the fields above. One entry a line, sorted: the same
entries are the same bytes, and a diff of two tables shows what differs.

Tables are a cache, so no state of the disk stops a program. A table that is damaged or that cannot
be written is reported once, as a `TuningWarning`, and the program goes on without it.

Many processes may tune at once. A writer holds a lock from reading the table to replacing it, so it
loses nothing that others wrote, and replaces it in one step, so a reader finds the old table or the
new one. The kernel releases the lock of a process that ends, however it ends; what such a process
left half-written has a name of its own, and the next writer removes it.

Tables that come with the package are in `shipped/`, in the same form.
"""

import contextlib
import glob
import hashlib
import json
import os
import re
import reprlib
import secrets
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

Entries = dict[str, dict[str, Any]]
"""Questions and their answers."""

FORMAT = 1
"""Of the file; another number is another meaning, and is not read."""

PATIENCE = 60.0
"""Seconds that a writer waits for others; each takes milliseconds, unless it is stopped."""


class TuningWarning(UserWarning):
    """A table of tuned choices cannot be used, or cannot be written."""


def folder() -> Path | None:
    """Where the user's tables are; None if no table is to be read or written.

    The environment variable CONVJAX_TUNING names the folder, or is "off". Without it, tables are in
    the platform's folder for caches; a user without a home has none.
    """
    named = os.environ.get("CONVJAX_TUNING", "")
    if named.lower() == "off":
        return None
    if named:
        return Path(os.path.expanduser(named))
    caches = _caches()
    return caches / "convjax" / "tuning" if caches else None


def path_of(device_kind: str) -> Path | None:
    """The user's table for a kind of device, such as "NVIDIA H200"; None as in `folder`."""
    place = folder()
    return place / _file_name(device_kind) if place else None


def read(path: Path) -> Entries:
    """The table at `path`; where there is no file, an empty one.

    A file that is no table counts as empty, and an entry that is no answer as absent: both are
    reported once and will be gone after the next `write`. Fields beyond the four are kept.
    """
    return _table(path, "it will be rebuilt by the next tuning")


def shipped(device_kind: str) -> Entries:
    """The table for a kind of device that comes with the package; there may be none."""
    tables = resources.files("pallas_kernels.tuning") / "shipped"
    return _table(tables / _file_name(device_kind), "convjax should be installed again")


def write(path: Path, new: Entries) -> bool:
    """Adds `new` to the table at `path`, where it replaces answers to the same questions.

    Returns whether the table now holds `new`. If the disk refuses, that is reported once, and the
    table is what it was.

    Raises:
      ValueError: an entry is no answer.
      TypeError: a field of an entry has no form in JSON.
    """
    for question, answer in new.items():
        if fault := _fault(answer):
            raise ValueError(f"the answer to {question!r} is none: {fault}")
    new = json.loads(json.dumps(new))  # as it will be read, tuples being lists
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            # A table that cannot be read may be whole: it is left alone, unlike a damaged one.
            present = _parsed(_content(path), path, "it is rebuilt now")
            _replace(path, _text(present | new))
    except OSError as error:
        _report(f"{path} cannot be written ({error}): it stays as it was", path, "written")
        return False
    return True


def _caches() -> Path | None:
    """The platform's folder for what programs can make again."""
    home = os.path.expanduser("~")
    if sys.platform == "win32":
        if local := os.environ.get("LOCALAPPDATA"):
            return Path(local)
        inside = Path("AppData", "Local")
    elif sys.platform == "darwin":
        inside = Path("Library", "Caches")
    else:
        # The XDG specification has relative paths ignored.
        if os.path.isabs(xdg := os.environ.get("XDG_CACHE_HOME", "")):
            return Path(xdg)
        inside = Path(".cache")
    return Path(home) / inside if os.path.isabs(home) else None


def _file_name(device_kind: str) -> str:
    """A name that every file system takes; kinds share one only if they differ in punctuation."""
    name = re.sub(r"[^a-z0-9.+_]+", "-", device_kind.lower()).strip("-.")
    if not name or len(name) > 100 or not device_kind.isascii():
        digest = hashlib.sha256(device_kind.encode(errors="surrogatepass")).hexdigest()
        name = f"{name[:100]}-{digest[:16]}".lstrip("-")
    return f"{name}.json"


def _table(path: Path | Traversable, remedy: str) -> Entries:
    try:
        content = _content(path)
    except OSError as error:
        _report(f"{path} cannot be read ({error}): it counts as empty", path, "read")
        return {}
    return _parsed(content, path, remedy)


def _content(path: Path | Traversable) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keeps other writers, of this process and of others, from the file at `path`.

    The lock is on a file beside it, which stays: were it removed, a process that waits for the
    removed file and one that makes a new file would both have the lock.
    """
    with path.with_name(f"{path.name}.lock").open("ab") as lock:
        give_up = time.monotonic() + PATIENCE
        while not _take(lock.fileno()):
            if time.monotonic() > give_up:
                raise TimeoutError(f"another process holds {lock.name} for {PATIENCE:g} s")
            time.sleep(0.005)
        try:
            yield
        finally:
            _release(lock.fileno())


if sys.platform == "win32":

    def _take(descriptor: int) -> bool:
        os.lseek(descriptor, 0, os.SEEK_SET)  # the byte that is locked is the one at the position
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        return True

    def _release(descriptor: int) -> None:
        os.lseek(descriptor, 0, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)

else:

    def _take(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _release(descriptor: int) -> None:
        # Said, not left to closing: a process forked meanwhile has the file open too.
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _replace(path: Path, text: str) -> None:
    """Puts `text` in the place of the file at `path` in one step; the caller holds the lock."""
    for left in path.parent.glob(f"{glob.escape(path.name)}.*.partial"):
        _remove(left)  # of a process that was killed: a living one would hold the lock
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with partial.open("xb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())  # else a crash of the machine may leave the name, and no text
        os.replace(partial, path)
    finally:
        _remove(partial)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _text(entries: Entries) -> str:
    lines = (
        f"    {json.dumps(question)}: {json.dumps(entries[question], sort_keys=True)}"
        for question in sorted(entries)
    )
    listed = ",\n".join(lines)
    listed = f"{{\n{listed}\n  }}" if entries else "{}"
    return f'{{\n  "format": {FORMAT},\n  "entries": {listed}\n}}\n'


def _parsed(content: bytes | None, path: Path | Traversable, remedy: str) -> Entries:
    """The entries in a file's content, None for no file; reports what is none, and the remedy."""
    if content is None:
        return {}
    try:
        found = _entries(content)
    except (ValueError, RecursionError) as error:  # no JSON, no text, too deep
        _report(f"{path} is damaged ({error}): it counts as empty; {remedy}", path, "read")
        return {}
    faults = {question: fault for question, answer in found.items() if (fault := _fault(answer))}
    if faults:
        question, fault = next(iter(faults.items()))
        _report(
            f"{path} is damaged ({len(faults)} of {len(found)} entries, as that of {question!r}: "
            f"{fault}): these count as absent; {remedy}",
            path,
            "read",
        )
    return {question: answer for question, answer in found.items() if question not in faults}


def _entries(content: bytes) -> dict[str, Any]:
    """What a file's content has for entries.

    Raises:
      ValueError: it is no table of this format.
      RecursionError: it is nested too deep to be one.
    """
    table = json.loads(content)
    if not isinstance(table, dict):
        raise ValueError(f"{reprlib.repr(table)} is no table")
    if type(table.get("format")) is not int or table["format"] != FORMAT:
        raise ValueError(f"format={reprlib.repr(table.get('format'))} must be {FORMAT}")
    if not isinstance(table.get("entries"), dict):
        raise ValueError(f"entries={reprlib.repr(table.get('entries'))} must be an object")
    return table["entries"]


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "backend": (lambda value: value in ("xla", "triton"), "'xla' or 'triton'"),
    "algorithm": (lambda value: isinstance(value, str | None), "a string or null"),
    "blocks": (
        lambda value: (
            value is None
            or (isinstance(value, dict) and all(type(size) is int for size in value.values()))
        ),
        "whole numbers by name, or null",
    ),
    "seconds": (
        lambda value: type(value) in (int, float) and 0 < value <= sys.float_info.max,
        "a positive number",
    ),
}


def _fault(answer: Any) -> str | None:
    """Why `answer` is none; None for an answer."""
    if not isinstance(answer, dict):
        return f"{reprlib.repr(answer)} is no object"
    for field, (holds, rule) in _RULES.items():
        if field not in answer:
            return f"{field} is missing"
        if not holds(answer[field]):
            return f"{field}={reprlib.repr(answer[field])} must be {rule}"
    return None


_reported: set[tuple[str, str]] = set()
"""Tables that the user knows of, and whether they cannot be read or written."""


def _report(message: str, path: Path | Traversable, trouble: str) -> None:
    if (str(path), trouble) not in _reported:
        _reported.add((str(path), trouble))
        warnings.warn(message, TuningWarning, stacklevel=3)
