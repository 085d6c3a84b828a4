"""What the tuner found, as a table for people and entries for tables on disk."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from pallas_kernels import selection
from pallas_kernels.calls import Call, Conv2d, Matmul, Pass
from pallas_kernels.selection import Choice
from pallas_kernels.tuning.screening import Objection


@dataclass(frozen=True)
class Row:
    """One pass of one shape. Times are seconds of one call, and None where nothing was measured."""

    call: Call
    which: Pass
    default: Choice | None
    """What is done where nothing was measured; None where the answer was known before."""
    count: int = 1
    """Times that the function asks."""
    winner: Choice | None = None
    seconds: float | None = None
    default_seconds: float | None = None
    xla_seconds: float | None = None
    """Of the fastest of XLA's algorithms."""
    floor: float | None = None
    """The least time that the device can take."""
    ways: int = 0
    """That there are."""
    measured: tuple[tuple[Choice, float], ...] = ()
    """The ways that were right, each with its time."""
    refused: tuple[str, ...] = ()
    """Ways that could not be compiled, or were wrong, and why."""
    dropped: tuple[tuple[Choice, Objection], ...] = ()
    """Kernels that were not timed, and what the compiler said against them."""

    @classmethod
    def known(cls, call: Call, which: Pass, count: int, choice: Choice) -> "Row":
        """A question whose answer was in the table."""
        return cls(call, which, None, count, choice)

    def times(self, count: int) -> "Row":
        return replace(self, count=count)

    def without(self, refused: list[str], dropped: list[tuple[Choice, Objection]]) -> "Row":
        return replace(self, refused=tuple(refused), dropped=tuple(dropped))

    def won(self, winner: Choice, **measured: Any) -> "Row":
        return replace(self, winner=winner, **measured)

    @property
    def choice(self) -> Choice | None:
        """What is done from now on."""
        return self.winner or self.default

    @property
    def gain(self) -> float | None:
        """How many times as fast as the default."""
        if self.seconds is None or self.default_seconds is None:
            return None
        return self.default_seconds / self.seconds

    @property
    def gain_over_xla(self) -> float | None:
        """How many times as fast as XLA's best."""
        if self.seconds is None or self.xla_seconds is None:
            return None
        return self.xla_seconds / self.seconds

    @property
    def entry(self) -> dict[str, Any]:
        """The entry of a table."""
        if self.winner is None:
            raise ValueError(f"{self.call.operation} {self.which} has no winner to keep")
        return selection.entry(
            self.winner,
            seconds=self.seconds,
            default_seconds=self.default_seconds,
            xla_seconds=self.xla_seconds,
        )


@dataclass(frozen=True)
class Report:
    """All passes of all shapes in a function."""

    device_kind: str
    rows: tuple[Row, ...]
    seconds: float
    """That tuning took."""
    unscreened: str | None = None
    """Why kernels were timed without having been compiled for their spills, if they were."""

    def __str__(self) -> str:
        heading = ("operation", "pass", "times", "winner", "ms", "floor", "gain", "over XLA")
        lines = [heading, *(self._line(row) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        measured = [row for row in self.rows if row.seconds is not None]
        before, after = (
            sum(row.count * (getattr(row, name) or 0.0) for row in measured)
            for name in ("default_seconds", "seconds")
        )
        table.append(
            f"{len(measured)} of {len(self.rows)} measured in {self.seconds:.0f} s on "
            f"{self.device_kind}: {before * 1e3:.1f} ms by default, {after * 1e3:.1f} ms tuned"
        )
        return "\n".join([*table, *self._screening()])

    def _screening(self) -> list[str]:
        """How many kernels were dropped and why, or why none was."""
        if self.unscreened is not None:
            return [f"no kernel was dropped before it was timed: {self.unscreened}"]
        kinds = Counter(found.kind for row in self.rows for _, found in row.dropped)
        counts = ", ".join(f"{number} for {kind}" for kind, number in kinds.most_common())
        return [f"{kinds.total()} kernels dropped before they were timed: {counts}"] * bool(kinds)

    def _line(self, row: Row) -> tuple[str, ...]:
        return (
            label(row.call),
            row.which,
            str(row.count),
            f"{row.choice}{_remark(row)}",
            _milliseconds(row.seconds),
            _milliseconds(row.floor),
            _ratio(row.gain),
            _ratio(row.gain_over_xla),
        )


def as_json(row: Row) -> dict[str, Any]:
    """A row as a JSON object; what was not measured is null. Times are seconds."""
    return {
        "operation": row.call.operation,
        "shapes": {name: list(x.shape) for name, x in row.call.operands().items()},
        "pass": row.which,
        "dtype": row.call.dtype,
        "count": row.count,
        "measured": row.seconds is not None,
        "choice": None if row.choice is None else selection.entry(row.choice),
        "seconds": row.seconds,
        "default_seconds": row.default_seconds,
        "xla_seconds": row.xla_seconds,
        "floor_seconds": row.floor,
        "ways": [{**selection.entry(way), "seconds": seconds} for way, seconds in row.measured],
        "refused": list(row.refused),
        "dropped": [{**selection.entry(way), "reason": str(why)} for way, why in row.dropped],
    }


def _remark(row: Row) -> str:
    if row.winner is not None:
        tried = len(row.measured) + len(row.refused) + len(row.dropped)
        return f", {tried} of {row.ways} tried" if tried < row.ways else ""
    return ", the only way" if row.ways == 1 else ", not timed"


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def label(call: Call) -> str:
    """A call in a few words: its operation, the shapes of its arrays, and their dtypes."""
    shapes = [
        "×".join(map(str, array.shape))
        for name, array in call.operands().items()
        if name in ("x", "w", "a", "b", "q", "k", "logits")
    ]
    made = isinstance(call, Conv2d | Matmul) and call.out_dtype
    dtypes = f"{call.dtype} to {made}" if made else call.dtype
    return f"{call.operation} {', '.join(shapes)} {dtypes}"
