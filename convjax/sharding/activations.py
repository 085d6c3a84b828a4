"""What the forward pass keeps for the backward pass, in bytes of one device's memory.

An activation here is an array that the compiled program makes in the forward pass and reads in the
backward pass. Together they are alive when the loss is known, so a step needs at least their memory
beside its arguments. What XLA computes again, or fuses away, is none.
"""

import itertools
import re
from collections.abc import Mapping
from typing import get_args

from convjax.sharding.origin import Pass, origin_of
from convjax.sharding.program import Computation, Instruction, Program, elements_of, size_of

_VIEWS = {"bitcast", "opt-barrier", "add-dependency", "copy-done"}
"""Other names for their first operand."""

_NO_ARRAYS = {"parameter", "constant", "iota", "partition-id", "replica-id"}
"""Arguments, and what is not kept because it costs nothing to have again."""


_PASSES: tuple[Pass, ...] = get_args(Pass)

_BODY = re.compile(r"\bbody=%([\w.\-]+)")


def activation_bytes(program: Program) -> int:
    """The most bytes of activations that one device has at one time, copies of kernels left out."""
    computation = program.entry
    phases, of_params = _phases(computation), _of_params(computation)
    when = {name: i for i, name in enumerate(computation.instructions)}
    change = [0] * (len(when) + 1)
    last_read: dict[tuple[str, int], tuple[int, int]] = {}
    for reader in computation.instructions.values():
        if phases[reader.name] != "backward" or _only_passes_on(reader):
            continue
        for operand in reader.operands:
            for made, index, size in _arrays(operand, None, program):
                is_argument = made.opcode in _NO_ARRAYS or made.name in of_params
                if phases[made.name] == "forward" and not is_argument:
                    last_read[made.name, index] = when[reader.name], size
    for (name, _), (end, size) in last_read.items():
        change[when[name]] += size
        change[end + 1] -= size
    return max(itertools.accumulate(change))


def _of_params(computation: Computation) -> set[str]:
    """Names of what is computed from parameters alone: copies of kernels in other layouts."""
    found: set[str] = set()
    constants = set()
    for name, instruction in computation.instructions.items():
        if instruction.opcode == "parameter":
            if ".params[" in instruction.op_name:
                found.add(name)
            continue
        read = set(instruction.operands) - constants
        if not read:
            constants.add(name)
        elif read <= found:
            found.add(name)
    return found


def _phases(computation: Computation) -> Mapping[str, Pass]:
    """The pass of each instruction; XLA's own belong to the latest of what they read."""
    phases: dict[str, Pass] = {}
    for instruction in computation.instructions.values():
        read = [phases[name] for name in instruction.operands]
        told = origin_of(instruction.op_name, {}).phase
        # What comes before the network, such as the images' normalisation, is no update.
        if told and not (told == "update" and set(read) <= {"forward"}):
            phases[instruction.name] = told
        else:
            phases[instruction.name] = _PASSES[max(map(_PASSES.index, read), default=0)]
    return phases


def _only_passes_on(instruction: Instruction) -> bool:
    return instruction.opcode in _VIEWS | {"tuple", "get-tuple-element"}


def _arrays(name: str, index: int | None, program: Program) -> list[tuple[Instruction, int, int]]:
    """Who made an array, the elements of a tuple, or element `index` of one; and their bytes."""
    instruction = program.entry.instructions[name]
    operands = instruction.operands
    if instruction.opcode in _VIEWS:
        return _arrays(operands[0], index, program)
    if instruction.opcode == "get-tuple-element":
        return _arrays(operands[0], instruction.index, program)
    if instruction.opcode == "tuple":
        chosen = operands if index is None else operands[index : index + 1]
        return [each for operand in chosen for each in _arrays(operand, None, program)]
    if index is not None and _is_passed_through(instruction, index, program):
        return _arrays(operands[0], index, program)
    elements = elements_of(instruction.shape)
    if index is None:
        return [(instruction, i, size_of(each)) for i, each in enumerate(elements)]
    return [(instruction, index, size_of(elements[index]))]


def _is_passed_through(instruction: Instruction, index: int, program: Program) -> bool:
    """Whether a loop gives back an element of its operand as it was: it only reads it."""
    if instruction.opcode != "while":
        return False
    body = program.computations[_BODY.findall(instruction.attributes)[0]]
    root = body.instructions[body.root]
    if root.opcode != "tuple":
        return False
    given = body.instructions[root.operands[index]]
    (parameter,) = [each for each in body.instructions.values() if each.opcode == "parameter"]
    return (
        given.opcode == "get-tuple-element"
        and given.index == index
        and given.operands == (parameter.name,)
    )
