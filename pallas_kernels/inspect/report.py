"""Answers for people, as lines or as a table, and for programs, as JSON."""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from pallas_kernels.calls import Call
from pallas_kernels.inspect.machine_code import MachineCode
from pallas_kernels.inspect.query import Answer


def _by_width(widths: dict[int, int]) -> dict[str, int]:
    return {str(bits): number for bits, number in widths.items()}


_OF_CODE: dict[str, Callable[[MachineCode], Any]] = {
    "threads": attrgetter("threads"),
    "registers": attrgetter("registers"),
    "spill_bytes": attrgetter("spill_bytes"),
    "shared_bytes": attrgetter("shared_bytes"),
    "occupancy": attrgetter("occupancy.fraction"),
    "occupancy_limit": attrgetter("occupancy.limit"),
    "blocks_per_multiprocessor": attrgetter("occupancy.blocks"),
    "instructions": attrgetter("instructions"),
    "tensor_core_instructions": lambda code: sum(code.matrix_instructions.values()),
    "matrix_instructions": attrgetter("matrix_instructions"),
    "load_widths": lambda code: _by_width(code.load_widths),
    "loop_instructions": attrgetter("loop_instructions"),
    "loop_tensor_core_instructions": attrgetter("loop_matrix_instructions"),
    "loop_load_widths": lambda code: _by_width(code.loop_load_widths),
    "loop_matrix_macs": attrgetter("loop_matrix_macs"),
    "issue_slots_per_matrix_cycle": attrgetter("issue_slots_per_matrix_cycle"),
    "unrolled_issue_slots_per_matrix_cycle": attrgetter("unrolled_issue_slots_per_matrix_cycle"),
}
"""What a JSON object says of machine code."""


def as_json(answer: Answer) -> dict[str, Any]:
    """An answer as a JSON object; what a call without a kernel has not is null.

    `reason` says why there is no kernel, or no machine code, and is null where there is. Registers
    and `spill_bytes` are of a thread, `shared_bytes` and `loop_matrix_macs` of a block; `occupancy`
    is a fraction; `load_widths` are {bits: loads}; `count` is the number of layers with this call.
    `issue_slots_per_matrix_cycle` takes `matrix_macs_per_cycle` for granted. `flops` and `bytes`
    are the launch's, or those of a call without one.
    """
    query, launch, code, floor = answer.query, answer.launch, answer.code, answer.floor
    entry: dict[str, Any] = {
        "operation": query.call.operation,
        "workload": query.workload and query.workload.name,
        "count": query.workload and query.workload.count,
        "shapes": {name: list(x.shape) for name, x in query.call.operands().items()},
        "pass": query.which,
        "dtype": query.call.dtype,
        "precision": query.precision,
        "arch": query.architecture.name,
        "gpu": query.gpu.name,
        "reason": answer.reason,
        "algorithm": launch and launch.algorithm,
        "grid": launch and list(launch.grid),
        "blocks": launch and launch.blocks,
    }
    entry |= {key: None if code is None else value(code) for key, value in _OF_CODE.items()}
    return entry | {
        "matrix_macs_per_cycle": query.architecture.matrix_macs,
        "flops": answer.flops,
        "bytes": answer.bytes_moved,
        "flops_per_byte": floor.intensity,
        "ridge_flops_per_byte": floor.ridge,
        "floor_seconds": floor.seconds,
        "bound": floor.bound,
    }


def as_lines(answer: Answer) -> str:
    """An answer as a few lines, a fact each."""
    query, launch, code = answer.query, answer.launch, answer.code
    facts = [f"{query.call.operation} {_shapes(query.call)}"]
    facts[0] += f", {query.which.replace('_', ' ')}, {query.call.dtype}, {query.architecture.name}"
    if launch is not None:
        blocks = " ".join(f"{name}={size}" for name, size in launch.blocks.items())
        grid = " × ".join(map(str, launch.grid))
        facts += [f"algorithm       {launch.algorithm}, grid {grid}", f"blocks          {blocks}"]
    if code is not None:
        facts += _code_lines(code)
    if answer.reason is not None:
        facts.append(f"machine code    none: {answer.reason}")
    facts += _floor_lines(answer)
    return "\n  ".join(facts)


def _shapes(call: Call) -> str:
    return ", ".join(
        f"{name} {'×'.join(map(str, array.shape))}" for name, array in call.operands().items()
    )


def _code_lines(code: MachineCode) -> list[str]:
    spills = f"{code.spill_bytes} bytes spilled" if code.spill_bytes else "no spills"
    full = code.occupancy
    fit = f"{full.blocks} × {code.threads} threads on a multiprocessor, limited by {full.limit}"
    if not full.blocks:
        fit = f"a block does not fit: it has too much {full.limit}"
    return [
        f"registers       {code.registers} a thread, {spills}",
        f"shared memory   {code.shared_bytes:,} bytes a block",
        f"occupancy       {full.fraction:.1%}: {fit}",
        f"matrix          {_counts(code.matrix_instructions) or 'no instructions'}",
        f"global loads    {_widths(code.load_widths)}",
        f"hot loop        {_loop(code)}",
    ]


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in counts.items())


def _widths(widths: dict[int, int]) -> str:
    return ", ".join(f"{bits}-bit: {number}" for bits, number in widths.items()) or "none"


def _loop(code: MachineCode) -> str:
    if code.unrolled_issue_slots_per_matrix_cycle is not None:
        slots = f"{code.unrolled_issue_slots_per_matrix_cycle:.2f}"
        return f"none: it is unrolled, or has one step; {slots} issue slots per matrix cycle"
    if not code.loop_instructions:
        return "none: it is unrolled, or has one step"
    parts = [f"{code.loop_instructions} instructions"]
    if code.loop_matrix_instructions:
        each = code.loop_instructions / code.loop_matrix_instructions
        parts.append(f"{code.loop_matrix_instructions} of the Tensor Cores, one in {each:.1f}")
    if code.issue_slots_per_matrix_cycle is not None:
        parts.append(f"{code.issue_slots_per_matrix_cycle:.2f} issue slots per matrix cycle")
    return "; ".join(parts)


def _floor_lines(answer: Answer) -> list[str]:
    floor, gpu = answer.floor, answer.query.gpu
    rate = f"{gpu.teraflops[answer.query.product]:.0f} TFLOP/s, {gpu.terabytes} TB/s"
    side = "above" if floor.bound == "compute" else "below"
    return [
        f"work            {answer.flops / 1e9:.4g} GFLOP, {answer.bytes_moved / 1e6:.4g} MB: "
        f"{floor.intensity:.1f} FLOP a byte",
        f"floor           {_time(floor.seconds)} on {gpu.name} ({rate}), bound by {floor.bound}: "
        f"{side} its ridge at {floor.ridge:.0f} FLOP a byte",
    ]


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.2f} µs"


_HEADINGS = (
    "workload", "pass", "dtype", "algorithm", "blocks", "registers", "spills", "shared",
    "occupancy", "matrix", "loop", "slots", "GFLOP", "MB", "floor", "bound",
)  # fmt: skip


def as_table(answers: Sequence[Answer]) -> str:
    """Answers as a table, one a row; the reasons of those without machine code follow it."""
    rows = [_HEADINGS, *(_row(answer) for answer in answers)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, *_reasons(answers)])


def _row(answer: Answer) -> tuple[str, ...]:
    query, launch, code, floor = answer.query, answer.launch, answer.code, answer.floor
    work = (
        f"{answer.flops / 1e9:.4g}",
        f"{answer.bytes_moved / 1e6:.4g}",
        _time(floor.seconds),
        floor.bound,
    )
    head = (_name(answer), query.which, query.call.dtype)
    if launch is None:
        return (*head, "-", *[""] * 8, *work)
    blocks = _blocks(launch.blocks)
    if code is None:
        return (*head, launch.algorithm, blocks, *[""] * 7, *work)
    slots = code.issue_slots_per_matrix_cycle
    return (
        *head,
        launch.algorithm,
        blocks,
        str(code.registers),
        str(code.spill_bytes),
        str(code.shared_bytes),
        f"{code.occupancy.fraction:.1%}",
        _counts(code.matrix_instructions) or "-",
        str(code.loop_instructions),
        "-" if slots is None else f"{slots:.2f}",
        *work,
    )


def _name(answer: Answer) -> str:
    workload = answer.query.workload
    return answer.query.call.operation if workload is None else workload.name


def _blocks(blocks: dict[str, int]) -> str:
    """128×256×64 w8 s3: the sides of the tile, warps and stages; and splits, if any."""
    others = ("warps", "stages", "splits", "group")
    sides = "×".join(str(size) for name, size in blocks.items() if name not in others)
    splits = f" /{blocks['splits']}" if blocks.get("splits", 1) > 1 else ""
    return f"{sides} w{blocks['warps']} s{blocks['stages']}{splits}"


def _reasons(answers: Iterable[Answer]) -> list[str]:
    return [
        f"{_name(answer)}, {answer.query.which}, {answer.query.call.dtype}: {answer.reason}"
        for answer in answers
        if answer.reason is not None
    ]
