"""What was measured to be fastest: the one question that an operation asks of the tuner.

    choice = selection.choose(call, "forward")

Operations ask while they are traced, with `backend="auto"`, once for each pass. The answers are in
tables on disk, which `tuning` writes; this module reads them when it is first asked, and never
measures. The same tables give the same program. What was compiled before a table changed stays as
it is until `jax.clear_caches()`.
"""

import contextlib
import functools
import json
import operator
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import jax
import numpy as np

from pallas_kernels import launch
from pallas_kernels.blocks import Blocks
from pallas_kernels.calls import Call, Conv2d, Matmul, MaxPool, Pass
from pallas_kernels.launch import Backend
from pallas_kernels.tuning import tables

Question = tuple[Call, Pass]

Listener = Callable[[Call, Pass], None]


@dataclass(frozen=True)
class Choice:
    """A way to do one pass of a call."""

    backend: Backend
    algorithm: str | None = None
    """Of a convolution."""
    blocks: Blocks | None = None
    """Of a kernel."""

    def __str__(self) -> str:
        words = [self.backend, self.algorithm or ""]
        if self.blocks is not None:
            words.append("×".join(str(getattr(self.blocks, side)) for side in ("m", "n", "k")))
            words.append(f"w{self.blocks.warps} s{self.blocks.stages}")
            words.append(f"/{self.blocks.splits}" if self.blocks.splits > 1 else "")
        return " ".join(word for word in words if word)

    @classmethod
    def of(cls, entry: dict[str, Any]) -> "Choice | None":
        """The choice in a table's entry; None if it is none that this version knows."""
        try:
            blocks = None if entry["blocks"] is None else Blocks(**entry["blocks"])
        except (TypeError, ValueError):
            return None
        return cls(entry["backend"], entry["algorithm"], blocks)


def choose(call: Call, which: Pass) -> Choice | None:
    """The fastest known way to do a pass on the device of this trace; None where none is known."""
    if not _is_askable(call):
        return None
    for listener in _listeners.get():
        listener(call, which)
    return _known(call, which)


def known(call: Call, which: Pass) -> Choice | None:
    """`choose` without anybody hearing of it: nothing is recorded, nothing tuned."""
    return _known(call, which) if _is_askable(call) else None


def _known(call: Call, which: Pass) -> Choice | None:
    tried = _tried.get()
    if tried is not None:
        question, choice = tried
        return choice if asked(call, which) == question else None
    entry = table(launch.device_kind()).get(key(call, which))
    return None if entry is None else Choice.of(entry)


def kernel_measured(call: Call) -> bool | None:
    """Whether a kernel was the fastest way to do a pass of `call`; None where none was measured."""
    measured = [choice for which in call.passes if (choice := known(call, which))]
    return any(choice.backend == "triton" for choice in measured) if measured else None


def resolve(
    call: Call,
    backend: str,
    *,
    possible: bool,
    guess: bool,
    blocks: Blocks | None,
    asks: bool = True,
) -> tuple[Backend, Blocks | None]:
    """The backend and the blocks of an operation whose passes go together.

    "auto" is what the tuner measured to be the fastest. Where nothing was measured it is the kernel
    on a GPU if `guess` says so, and XLA. Errors as in `launch.resolve`.

    Args:
      call: what the tuner is asked about.
      backend: as the user gave it.
      possible: whether there is a kernel for this call.
      guess: whether it is the better choice, where it is possible.
      blocks: as the user gave them.
      asks: whether the tuner's answer to `call` is one to this call.
    """
    there = launch.platform() == "gpu" and possible
    kernel_first, tuned = there and guess, None
    if asks and backend == "auto" and blocks is None:
        choice = choose(call, "backward")
        if choice is not None:
            kernel_first = there and choice.backend == "triton"
            tuned = choice.blocks if kernel_first else None
    available = launch.ranked(kernel_first)
    return launch.resolve(call.operation, backend, available=available, blocks=blocks), (
        blocks or tuned
    )


def asked(call: Call, which: Pass) -> Question:
    """The question in the form in which it is measured: a gradient has no epilogue and no dtype but
    its operands', a batch of rows that shares its second matrix is one tall matrix, and passes that
    go together are one."""
    if "backward" in call.passes:
        which = "backward"
    if isinstance(call, Conv2d | MaxPool):
        rows, columns = call.windows
        edges = (rows.before, rows.after), (columns.before, columns.after)
        call = replace(call, padding=edges)
    if isinstance(call, Matmul) and len(call.b) == 2:
        *rows, k = call.a
        call = replace(call, a=(functools.reduce(int.__mul__, rows), k))
    if isinstance(call, Conv2d | Matmul):
        if which != "forward":
            call = replace(call, bias=False, residual=False, activation=None, out_dtype=None)
        elif call.out_dtype == call.dtype:
            call = replace(call, out_dtype=None)
    return call, which


def key(call: Call, which: Pass) -> str:
    """A question as the name of its entry in a table."""
    call, which = asked(call, which)
    given = {
        field.name: getattr(call, field.name)
        for field in fields(call)
        if getattr(call, field.name) != field.default
    }
    question = {"operation": call.operation, "pass": which, "jax": jax.__version__, **given}
    return json.dumps(question, sort_keys=True, default=operator.index)  # numpy's integers


def _is_askable(call: Call) -> bool:
    """Whether every size is known, as it may not be in `jax.export`, and none is zero."""
    shapes = [value for value in vars(call).values() if isinstance(value, tuple)]
    sizes = [size for shape in shapes for size in shape if not isinstance(size, tuple)]
    if not all(isinstance(size, int | np.integer) for size in sizes):
        return False
    return all(x.size for x in call.operands().values())


def entry(choice: Choice, **measured: Any) -> dict[str, Any]:
    """A choice as an entry of a table, with what was measured."""
    blocks = None if choice.blocks is None else asdict(choice.blocks)
    return {
        "backend": choice.backend,
        "algorithm": choice.algorithm,
        "blocks": blocks,
        **measured,
    }


@functools.cache
def table(device_kind: str) -> dict[str, Any]:
    """The answers for a device: the package's, and over them the user's."""
    path = tables.path_of(device_kind)
    return tables.shipped(device_kind) | ({} if path is None else tables.read(path))


def remember(device_kind: str, entries: dict[str, Any]) -> bool:
    """Puts entries into the table in use, and on disk; whether they are there too."""
    table(device_kind).update(entries)
    path = tables.path_of(device_kind)
    return path is not None and tables.write(path, entries)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """`listener` hears every question that is asked in this context, before it is answered."""
    token = _listeners.set((*_listeners.get(), listener))
    try:
        yield
    finally:
        _listeners.reset(token)


_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("listeners", default=())


@contextlib.contextmanager
def trying(call: Call, which: Pass, choice: Choice) -> Iterator[None]:
    """The answer to one question is `choice` in this context, and to all others that none is known.

    So a candidate is traced as the operation itself would run it.
    """
    token, heard_by = _tried.set((asked(call, which), choice)), _listeners.set(())
    try:
        yield
    finally:
        _tried.reset(token)
        _listeners.reset(heard_by)


_tried: ContextVar[tuple[Question, Choice] | None] = ContextVar("tried", default=None)
