"""Which devices of a mesh talk to each other in a collective, read from the compiled program.

XLA writes the groups in one of these ways, of devices numbered in the order of the mesh:

    replica_groups={{0,1},{2,3}}                  each group; {} is one group of all
    replica_groups=[2,2]<=[2,2]T(1,0)             2 groups of 2, of a transposed 2×2 array
    replica_groups=mesh['a'=2,'b'=2] {'b'}        over an axis of a mesh of its own, whose
                                                  devices may be reordered: device_ids=(...)
    source_target_pairs={{0,1},{1,0}}             who sends to whom
"""

import itertools
import re
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

Groups = frozenset[frozenset[int]]

_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? \{([^}]*)\}")
_AXIS = re.compile(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?")


def groups_of(attributes: str, devices: int) -> Groups:
    """The groups in an instruction's attributes; of pairs, those that are two devices.

    Raises:
      ValueError: none are there, or in none of the ways above.
    """
    if found := _LISTED.search(attributes):
        listed = [frozenset(_numbers(group)) for group in re.findall(r"\{([\d,]*)\}", found[1])]
        if "source_target_pairs" in found[0]:
            return frozenset(pair for pair in listed if len(pair) == 2)
        return frozenset(listed) or frozenset([frozenset(range(devices))])
    if found := _IOTA.search(attributes):
        return _rows(_iota(found[2], found[3]).reshape(_numbers(found[1])))
    if found := _MESH.search(attributes):
        return _over_named_axes(found[1], found[2], found[3])
    raise ValueError(f"no replica groups in {attributes[:200]!r}")


def axes_of(groups: Groups, mesh: Mesh, *, pairs: bool = False) -> tuple[str, ...] | None:
    """The fewest axes of the mesh along which these devices talk; None where they are no axes.

    Args:
      groups: as `groups_of` gives them.
      mesh: whose axes are sought.
      pairs: the groups are senders and targets, which lie somewhere along the axes; else they are
        all devices along them.
    """
    names = [name for name, size in mesh.shape.items() if size > 1]
    for count in range(1, len(names) + 1):
        for axes in itertools.combinations(names, count):
            along = groups_along(mesh, axes)
            if groups == along or (pairs and _within(groups, along)):
                return axes
    return None


def groups_along(mesh: Mesh, axes: Sequence[str]) -> Groups:
    """The groups of devices that differ in the position along `axes` only."""
    order = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
    names = list(mesh.shape)
    last = [names.index(axis) for axis in axes]
    order = np.moveaxis(order, last, range(-len(last), 0))
    return _rows(order.reshape(-1, int(np.prod(order.shape[-len(last) :]))))


def _over_named_axes(sizes: str, device_ids: str | None, axes: str) -> Groups:
    """Groups over axes, or parts `axis:(before)size` of axes, of the mesh that XLA writes."""
    lengths = {name.strip("'"): int(size) for name, size in re.findall(r"([^,=]+)=(\d+)", sizes)}
    order = np.arange(int(np.prod(list(lengths.values()))))
    if device_ids:
        iota = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", device_ids)
        order = _iota(iota[1], iota[2]) if iota else np.array(_numbers(device_ids))
    asked = {name: (before, size) for name, before, size in _AXIS.findall(axes)}
    shape: list[int] = []
    last: list[int] = []
    for name, length in lengths.items():
        before, size = asked.get(name, ("", ""))
        whole = name in asked and not size
        parts = (
            [length] if not size else [int(before), int(size), length // int(before) // int(size)]
        )
        if whole or size:
            last.append(len(shape) + (0 if whole else 1))
        shape += parts
    order = np.moveaxis(order.reshape(shape), last, range(-len(last), 0))
    return _rows(order.reshape(-1, int(np.prod([shape[axis] for axis in last]))))


def _iota(shape: str, transposed: str | None) -> np.ndarray:
    """The numbers of all devices as an array of that shape, its axes in another order."""
    sizes = _numbers(shape)
    order = np.arange(int(np.prod(sizes))).reshape(sizes)
    return order.transpose(_numbers(transposed)) if transposed else order


def _within(groups: Groups, wider: Groups) -> bool:
    return all(any(group <= other for other in wider) for group in groups)


def _rows(order: np.ndarray) -> Groups:
    return frozenset(frozenset(map(int, row)) for row in order)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))
