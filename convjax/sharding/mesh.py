"""The mesh: devices in rows and columns, whose axes have the names of what is split over them.

    data    examples; parameters are whole on each device
    fsdp    examples, and parameters too, which are gathered layer by layer where they are used
    model   the insides of layers: heads, hidden units
    tower   AlexNet's towers

The last axes lie innermost, where devices have the fastest links: they talk in each layer.
"""

from collections.abc import Sequence
from math import prod

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "model", "tower")

BATCH = PartitionSpec(("data", "fsdp"))
"""How examples are split: arrays whose first axis counts them."""


def make_mesh(
    data: int = -1,
    fsdp: int = 1,
    model: int = 1,
    tower: int = 1,
    *,
    devices: Sequence[jax.Device] | None = None,
    explicit: bool = False,
) -> Mesh:
    """A mesh of `data` × `fsdp` × `model` × `tower` devices.

    Args:
      data: one size may be -1: as many as the devices that are left.
      fsdp: as data.
      model: as data.
      tower: as data.
      devices: those of this mesh; None takes all there are, or the first ones if the sizes say so.
      explicit: arrays' types say how they are split, and jax refuses what is ambiguous; else XLA
        finds it out. See jax's documentation of explicit sharding.

    Raises:
      ValueError: a size that is neither -1 nor at least 1, two of -1, or sizes whose product the
        devices do not give.
    """
    sizes = dict(zip(AXES, (data, fsdp, model, tower), strict=True))
    available = list(jax.devices() if devices is None else devices)
    for axis, size in sizes.items():
        if size != -1 and size < 1:
            raise ValueError(f"{axis}={size} must be at least 1, or -1 for all devices left")
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ValueError(f"{' and '.join(f'{axis}=-1' for axis in open_axes)}: only one may be -1")
    fixed = prod(size for size in sizes.values() if size != -1)
    asked = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    if open_axes and len(available) % fixed:
        raise ValueError(f"{asked}: {fixed} must divide the number of devices, {len(available)}")
    sizes |= dict.fromkeys(open_axes, len(available) // fixed)
    count = prod(sizes.values())
    if count > len(available) or (devices is not None and count != len(available)):
        raise ValueError(f"{asked} takes {count} devices, and there are {len(available)}")
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return jax.make_mesh(
        tuple(sizes.values()), AXES, (kind,) * len(AXES), devices=available[:count]
    )


def process_rows(mesh: Mesh, batch_size: int) -> tuple[int, int]:
    """(i, n): this process's devices hold the i-th of n equal parts of a batch split by `BATCH`.

    Processes whose devices differ along other axes only have the same part.

    Raises:
      ValueError: data × fsdp do not divide `batch_size`, the mesh has no device of this process, or
        its devices' examples do not lie together.
    """
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    if batch_size % parts:
        sizes = f"data={mesh.shape['data']} × fsdp={mesh.shape['fsdp']}"
        raise ValueError(f"{sizes} must divide the batch of {batch_size}")
    layout = NamedSharding(mesh, BATCH)
    here = [rows[0] for rows in layout.addressable_devices_indices_map((parts,)).values() if rows]
    if not here:
        raise ValueError(f"no device of process {jax.process_index()} is in the mesh")
    starts = {rows.indices(parts)[0] for rows in here}
    first, count = min(starts), len(starts)
    if max(starts) - first != count - 1 or first % count or parts % count:
        raise ValueError(
            f"process {jax.process_index()} has parts {sorted(starts)} of {parts} of a batch: they "
            "must follow each other"
        )
    return first // count, parts // count
