"""A plan for people: memory, collectives and times in tables of at most 80 columns."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

from rich.console import Console
from rich.table import Table

from convjax.sharding.collectives import Collective
from convjax.sharding.links import LINKS
from convjax.sharding.origin import Pass
from convjax.sharding.plan.planning import Plan

_ROWS = 24
"""More collectives than this are summed up by pass, kind and axis."""

_MEANS = {
    "activations": "kept by the forward pass for the backward pass",
    "temporaries": "gradients, and what lives shortly",
}


@dataclass(frozen=True)
class _Row:
    """One collective, or the sum of several."""

    phase: Pass
    layers: tuple[str, ...]
    kind: str
    axis: str
    count: str
    sent: int


def print_plan(plan: Plan) -> None:
    """Print it to the standard output."""
    console = Console()
    console = console if console.is_terminal else Console(width=80)
    console.print(_headline(plan), highlight=False)
    for note in plan.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    console.print()
    console.print(_memory(plan))
    console.print()
    if not plan.collectives:
        console.print("no collectives: the devices do not talk", highlight=False)
        return
    console.print(_collectives(plan.collectives))
    console.print()
    console.print(_times(plan))


def _headline(plan: Plan) -> str:
    config = plan.config
    axes = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.items() if size > 1)
    devices = f"{plan.devices} × {plan.target.gpu.device_kind}"
    if not plan.on_gpu:
        devices = f"{plan.devices} simulated devices"
    return (
        f"{config.model.name}, {config.model.dtype}, batches of {config.data.batch_size}, "
        f"{config.optimiser.name}, on {devices}{f' ({axes})' if axes else ''}"
    )


def _memory(plan: Plan) -> Table:
    table = _table(("memory of one device", False), ("", True), ("", False))
    memory = plan.memory
    rows = {
        "parameters": memory.parameters,
        "batch statistics": memory.statistics,
        "optimiser": memory.optimiser,
        "images and labels": memory.batch,
        "activations": memory.activations,
        "temporaries": memory.temporaries,
    }
    for name, size in rows.items():
        if size or name != "batch statistics":
            table.add_row(name, _bytes(size), _MEANS.get(name, ""))
    fits = "fits in" if plan.fits else "does not fit in"
    table.add_row("total", _bytes(memory.total), f"{fits} {_bytes(plan.capacity)}", style="bold")
    return table


def _collectives(collectives: Sequence[Collective]) -> Table:
    rows = [_row(each) for each in collectives]
    headings = [("pass", False), ("layer", False), ("collective", False), ("axis", False)]
    if len(rows) > _ROWS:
        rows = _summed(rows)
    table = _table(*headings, ("times", True), ("sent", True))
    for row in sorted(rows, key=lambda row: get_args(Pass).index(row.phase)):
        table.add_row(
            row.phase, _layers(row.layers), row.kind, row.axis, row.count, _bytes(row.sent)
        )
    total = sum(row.sent for row in rows)
    table.add_row("all", "of each device", "", "", "", _bytes(total), style="bold")
    return table


def _row(each: Collective) -> _Row:
    layers = tuple(dict.fromkeys(part.layer for part in each.parts))
    times = "?" if each.times is None else f"{each.times}"
    return _Row(each.phase, layers, each.kind, each.axis or "?", times, each.bytes)


def _summed(rows: Iterable[_Row]) -> list[_Row]:
    """One row for each pass, kind and axis."""
    groups: dict[tuple[Pass, str, str], list[_Row]] = {}
    for row in rows:
        groups.setdefault((row.phase, row.kind, row.axis), []).append(row)
    return [
        _Row(
            phase,
            tuple(dict.fromkeys(layer for row in group for layer in row.layers)),
            kind,
            axis,
            _count(group),
            sum(row.sent for row in group),
        )
        for (phase, kind, axis), group in groups.items()
    ]


def _count(group: Sequence[_Row]) -> str:
    if any(row.count == "?" for row in group):
        return "?"
    return str(sum(int(row.count) for row in group))


def _times(plan: Plan) -> Table:
    phases = [phase for phase in get_args(Pass) if plan.sent(phase)]
    table = _table(
        ("milliseconds a step", False), *((phase, True) for phase in phases), ("all", True)
    )
    for link in LINKS:
        sizes = [*map(plan.sent, phases), plan.sent()]
        table.add_row(
            f"{link.name}, {link.bandwidth / 1e9:.3g} GB/s",
            *(f"{link.seconds(size) * 1e3:,.3f}" for size in sizes),
        )
    return table


def _layers(layers: Sequence[str]) -> str:
    if len(layers) <= 2:
        return ", ".join(layers)
    return f"{layers[0]} … {layers[-1]} ({len(layers)})"


def _bytes(size: int) -> str:
    """Two to four digits and a unit: "1,023 MiB"."""
    number, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if number >= 1024:
            number, unit = number / 1024, larger
    return f"{number:,.0f} {unit}" if number >= 100 or unit == "B" else f"{number:.1f} {unit}"


def _table(*headings: tuple[str, bool]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading, is_number in headings:
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=is_number)
    return table
