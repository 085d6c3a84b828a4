"""The collectives of a compiled program: which layer talks, in which pass, over which axis.

    for each in collectives_of(Program.parse(compiled.as_text()), mesh, params):
        print(each.kind, each.layer, each.phase, each.axis, each.bytes)

XLA often makes one collective of many: the gradients of several layers are added up together. Then
`parts` says whose they are.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from jax.sharding import Mesh

from convjax.sharding.links import KINDS, Kind, bytes_sent
from convjax.sharding.origin import NOWHERE, Origin, Pass, origin_of
from convjax.sharding.program import Computation, Instruction, Program, Visit
from convjax.sharding.replica_groups import axes_of, groups_of

_FURTHEST = 64
"""Instructions that are asked where they come from, on the way to one that knows."""

_ELSEWHERE = {"forward": "loss", "backward": "loss", "update": "optimiser, metrics"}
"""What is in no layer, by the pass."""


@dataclass(frozen=True)
class Part:
    """What one array of a collective is.

    Attributes:
      layer: whose it is; "loss", or "optimiser, metrics", for what is in none.
      phase: of the step.
      bytes: that a device sends of it in a step.
    """

    layer: str
    phase: Pass
    bytes: int


@dataclass(frozen=True)
class Collective:
    """One collective operation of a training step.

    Attributes:
      kind: by XLA's name.
      axis: the mesh's axis, several with commas between; None if the devices are of no axis.
      devices: that take part in a group.
      size: bytes that each of them puts in, each time.
      bytes: that each of them sends in a step, and receives, by the ring algorithm (`links`).
      times: how often it runs in a step; None in a loop whose length XLA does not know, which is
        counted once.
      parts: its arrays.
    """

    kind: Kind
    axis: str | None
    devices: int
    size: int
    bytes: int
    times: int | None
    parts: tuple[Part, ...]

    @property
    def layer(self) -> str:
        """The layers of its parts, with commas between them."""
        return ", ".join(dict.fromkeys(part.layer for part in self.parts))

    @property
    def phase(self) -> Pass:
        """That of its largest part."""
        return max(self.parts, key=lambda part: part.bytes).phase


def collectives_of(program: Program, mesh: Mesh, params: Mapping[str, Any]) -> Iterator[Collective]:
    """The collectives that one step runs, in the order of the program.

    Args:
      program: compiled for the mesh's devices.
      mesh: whose axes are named.
      params: the network's parameters or their shapes, nested by layers' names.
    """
    for visit in program.visits():
        kind = visit.instruction.opcode.removesuffix("-start")
        if kind in KINDS:
            collective = _collective(cast(Kind, kind), visit, program, mesh, params)
            if collective.devices > 1:
                yield collective


def _collective(
    kind: Kind, visit: Visit, program: Program, mesh: Mesh, params: Mapping[str, Any]
) -> Collective:
    instruction = visit.instruction
    pairs = kind == "collective-permute"
    groups = groups_of(instruction.attributes, mesh.size)
    axes = axes_of(groups, mesh, pairs=pairs)
    devices = max(map(len, groups), default=1)
    arrays = [
        (size * (1 if visit.times is None else visit.times), origin)
        for size, origin in _arrays(visit, program, params)
    ]
    parts = tuple(
        Part(
            layer or _ELSEWHERE[phase or "update"],
            phase or "update",
            bytes_sent(kind, size, devices),
        )
        for size, (layer, phase) in arrays
    )
    return Collective(
        kind=kind,
        axis=",".join(axes) if axes else None,
        devices=devices,
        size=sum(source.size for source in visit.computation.sources(instruction)),
        bytes=bytes_sent(kind, sum(size for size, _ in arrays), devices),
        times=visit.times,
        parts=parts,
    )


def _arrays(visit: Visit, program: Program, params: Mapping[str, Any]) -> list[tuple[int, Origin]]:
    """The bytes that each array puts in, and where it comes from."""
    instruction, computation = visit.instruction, visit.computation
    sources = computation.sources(instruction)
    if len(sources) == 1 and _is_concatenation(sources[0], program):
        sources = computation.sources(sources[0])
    own = origin_of(instruction.op_name, params)
    if len(sources) == 1 and (own.layer or _is_of_no_layer(own)):
        return [(sources[0].size, own)]
    found = [_origin(source, visit, params) for source in sources]
    known = own if len(sources) == 1 else NOWHERE
    return [
        (source.size, Origin(origin.layer, known.phase or origin.phase))
        for source, origin in zip(sources, found, strict=True)
    ]


def _origin(source: Instruction, visit: Visit, params: Mapping[str, Any]) -> Origin:
    """Where an operand comes from, or, of what is gathered, who reads it: the nearest that knows.

    The layer and the pass need not be of the same instruction: XLA's own carry one or neither.
    """
    before = _nearest(source, visit.computation, params, backwards=True)
    after = _nearest(visit.instruction, visit.computation, params, backwards=False)
    is_sum = "reduce" in visit.instruction.opcode
    first, second = (before, after) if is_sum else (after, before)
    return first if _is_of_no_layer(first) else _completed(first, second, _around(visit, params))


def _nearest(
    start: Instruction, computation: Computation, params: Mapping[str, Any], *, backwards: bool
) -> Origin:
    """The first layer and the first pass that are found from instruction to instruction."""
    queue, seen = deque([start]), {start.name}
    origin = NOWHERE
    while queue and len(seen) < _FURTHEST and not all(origin):
        here = queue.popleft()
        told = origin_of(here.op_name, params)
        origin = _completed(origin, told)
        if _is_of_no_layer(told):  # further on are layers that it only reads
            return origin
        step = computation.sources(here) if backwards else computation.users[here.name]
        for each in step:
            if each.name not in seen:
                seen.add(each.name)
                queue.append(each)
    return origin


def _around(visit: Visit, params: Mapping[str, Any]) -> Origin:
    """What the loops and calls around it say."""
    origin = NOWHERE
    caller = visit.caller
    while caller is not None and not all(origin):
        told = origin_of(caller.instruction.op_name, params)
        origin = _completed(origin, told)
        caller = caller.caller
    return origin


def _is_of_no_layer(origin: Origin) -> bool:
    """Whether it is the loss, or of the optimiser; a gradient without a layer may be a layer's."""
    return not origin.layer and origin.phase in ("forward", "update")


def _completed(*origins: Origin) -> Origin:
    """The first layer and the first pass that are known."""
    layer, phase = NOWHERE
    for origin in origins:
        layer, phase = layer or origin.layer, phase or origin.phase
    return Origin(layer, phase)


def _is_concatenation(instruction: Instruction, program: Program) -> bool:
    """Whether it puts several arrays one after the other, to be reduced in one go."""
    if len(instruction.operands) < 2:
        return False
    if instruction.opcode == "fusion":
        (name,) = instruction.called
        called = program.computations[name]
        return called.instructions[called.root].opcode == "concatenate"
    return instruction.opcode == "concatenate"
