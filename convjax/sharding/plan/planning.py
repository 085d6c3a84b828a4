"""From a run's config and a mesh to a plan: compile the step, read the program."""

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax

from convjax.sharding.collectives import Collective, collectives_of
from convjax.sharding.links import LINKS
from convjax.sharding.mesh import AXES
from convjax.sharding.origin import Pass
from convjax.sharding.plan.memory import Memory, memory_of
from convjax.sharding.plan.placeholder import Placeholder, source_of
from convjax.sharding.program import Program
from convjax.sharding.targets import NoPluginError, Target
from convjax.training.config import RunConfig
from convjax.training.errors import ConfigError, RunError, one_line
from convjax.training.parts import Parts, assemble

_ON_GPU: dict[str, str | bool] = {
    "xla_gpu_autotune_level": "0",
    "xla_gpu_enable_triton_gemm": False,
}
"""Without a GPU there is nothing to measure kernels on: products go to cuBLAS."""
_ON_CPU: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
"""The machine code is not run: LLVM need not try."""


@dataclass(frozen=True)
class Plan:
    """What a training step needs of every device, and what the devices say to each other.

    Attributes:
      config: of the run.
      target: the GPU that it is for.
      mesh: sizes of the axes.
      on_gpu: whether the program is that of a GPU; else it is the CPU's.
      memory: of one device.
      capacity: bytes of memory that a device has.
      collectives: in the order of the program.
      notes: what the reader must know of how this was found.
    """

    config: RunConfig
    target: Target
    mesh: Mapping[str, int]
    on_gpu: bool
    memory: Memory
    capacity: int
    collectives: tuple[Collective, ...]
    notes: tuple[str, ...]

    @property
    def devices(self) -> int:
        """How many there are."""
        return prod(self.mesh.values())

    @property
    def fits(self) -> bool:
        """Whether the step's memory is at most the device's."""
        return self.memory.total <= self.capacity

    def sent(self, phase: Pass | None = None) -> int:
        """Bytes that a device sends in a step, or in one pass of it, and receives."""
        return sum(
            part.bytes
            for each in self.collectives
            for part in each.parts
            if phase in (None, part.phase)
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values: sizes in bytes, times in seconds."""
        return {
            "config": dataclasses.asdict(self.config),
            "device": self.target.gpu.device_kind,
            "program": "gpu" if self.on_gpu else "cpu",
            "devices": self.devices,
            "mesh": dict(self.mesh),
            "memory_per_device": dataclasses.asdict(self.memory),
            "capacity": self.capacity,
            "fits": self.fits,
            "collectives": [_collective_as_json(each) for each in self.collectives],
            "sent_per_device": self.sent(),
            "seconds": {link.name: link.seconds(self.sent()) for link in LINKS},
            "notes": list(self.notes),
        }


def make_plan(
    config: RunConfig, mesh: Mapping[str, int] | None, target: Target, capacity: int | None = None
) -> Plan:
    """Compile a run's training step for GPUs that need not be here, and read what it needs.

    Without the CUDA plug-in, or with another version's, it is compiled for as many simulated CPU
    devices, and `notes` says so.

    Args:
      config: of the run.
      mesh: sizes of the axes; those that are left out are 1. None is the config's own mesh, where
        an axis of all devices that are left (-1) is 1 too: nobody knows how many there will be.
      target: the GPU.
      capacity: bytes of memory of a device; None is the GPU's own.

    Raises:
      ConfigError: an axis that there is not, or a config that does not fit itself or the mesh.
      RunError: the compiler refuses the step.
    """
    sizes = mesh_sizes(config, mesh)
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, **sizes))
    devices, notes = _devices(target, prod(sizes.values()))
    on_gpu = devices[0].platform != "cpu"
    source = source_of(config)
    if isinstance(source, Placeholder):
        shape = "×".join(map(str, source.image_shape))
        notes.append(
            f"{config.data.name} is not on this machine: planned for images of {shape} and "
            f"{source.num_classes} classes"
        )
    parts = assemble(config, devices=devices, sources=(source, source))
    compiled = _compiled(parts, on_gpu)
    program = Program.parse(compiled.as_text() or "")
    state, batch = parts.abstract_state(), parts.abstract_batch()
    return Plan(
        config=config,
        target=target,
        mesh=sizes,
        on_gpu=on_gpu,
        memory=memory_of(compiled, program, state, batch),
        capacity=target.memory if capacity is None else capacity,
        collectives=tuple(collectives_of(program, parts.layout.mesh, state.params)),
        notes=tuple(notes),
    )


def mesh_sizes(config: RunConfig, mesh: Mapping[str, int] | None) -> dict[str, int]:
    """The size of each axis; arguments and errors are those of `make_plan`."""
    if mesh is None:
        mesh = {axis: max(1, getattr(config.mesh, axis)) for axis in AXES}
    for axis, size in mesh.items():
        if axis not in AXES:
            raise ConfigError(f"mesh: no axis {axis}; there are {', '.join(AXES)}")
        if size < 1:
            raise ConfigError(f"mesh: {axis}={size} must be at least 1")
    return {axis: mesh.get(axis, 1) for axis in AXES}


def _devices(target: Target, count: int) -> tuple[list[jax.Device], list[str]]:
    """The GPUs to compile for, or simulated devices in their place; and what to say of it."""
    try:
        return target.devices(count), []
    except NoPluginError as error:
        note = f"{error}: planned from the program of {count} simulated CPU devices"
    if getattr(jax.config, "jax_num_cpu_devices", -1) < count:
        with contextlib.suppress(RuntimeError):  # jax has begun, with as many as it has
            jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ConfigError(f"{count} devices: this process simulates {len(devices)} on its CPU")
    return devices[:count], [note]


def _compiled(parts: Parts, on_gpu: bool) -> jax.stages.Compiled:
    step = parts.train_step()
    state, batch = parts.abstract_state(), parts.abstract_batch()
    try:
        with jax.set_mesh(parts.layout.mesh):
            lowered = step.lower(state, batch)
            return lowered.compile(compiler_options=_ON_GPU if on_gpu else _ON_CPU)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"the step does not compile: {one_line(error)}") from error
    except jax.errors.JaxRuntimeError as error:
        raise RunError(f"the compiler refuses the step: {one_line(error)}") from error


def _collective_as_json(each: Collective) -> dict[str, Any]:
    return {
        "kind": each.kind,
        "layer": each.layer,
        "pass": each.phase,
        "bytes": each.bytes,
        "axis": each.axis,
        "devices": each.devices,
        "size": each.size,
        "times": each.times,
        "parts": [
            {"layer": part.layer, "pass": part.phase, "bytes": part.bytes} for part in each.parts
        ],
    }
