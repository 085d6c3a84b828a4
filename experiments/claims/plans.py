"""What C6, C7 and C8 read: AlexNet's compiled training step, on one device and split in ways."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from convjax.sharding.plan.planning import make_plan
from convjax.sharding.targets import NoPluginError, target
from convjax.training.config import load_config, to_dict
from experiments.claims.claim import Preset, Task

GIB = 2**30

_GPU = target("NVIDIA H200")
_CONFIG = Path(__file__).parents[2] / "configs" / "alexnet_2012.py"
_SMALL = {
    "model.fields.widths": "(8, 16, 16, 16, 16)",
    "model.fields.dense_width": "32",
    "model.fields.dropout": "0.0",
    "data.batch_size": "8",
}
"""For a smoke run."""


def plan(
    task: Task, name: str, mesh: Mapping[str, int], fields: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The plan of the published AlexNet's step at batch 128: `convjax.sharding.plan --json`.

    Args:
      task: keeps it, so that a script that is continued does not compile again.
      name: of the part.
      mesh: sizes of the axes that are not 1.
      fields: of the config, by dotted names, in place of its own.
    """
    overrides = {**_small(task.preset), **(fields or {})}
    jax.config.update("jax_platforms", "cpu")  # the plug-in compiles for GPUs, and wants none

    def compiled() -> tuple[dict[str, Any], dict[str, Any]]:
        return make_plan(load_config(_CONFIG, overrides), mesh, _GPU).as_json(), {}

    settings = {
        "mesh": dict(mesh),
        "config": to_dict(load_config(_CONFIG, overrides)),
        "compiler": _compiler(),
    }
    part = task.part(name, settings, compiled)
    task.check_stop()
    return dict(part.values)


def program_of(plan: Mapping[str, Any]) -> str:
    """Whose compiled program a plan was read from."""
    kind = plan["device"] if plan["program"] == "gpu" else "simulated CPU device"
    count = plan["devices"]
    return f"XLA's program for {count} {kind}{'s' if count > 1 else ''}"


def _compiler() -> str:
    """Whose program it will be; one of a CPU is done again once there is a plug-in."""
    try:
        kind = _GPU.devices(1)[0].device_kind
    except NoPluginError:
        kind = "CPU"
    return f"{kind}, jax {jax.__version__}"


def _small(preset: Preset) -> dict[str, str]:
    return _SMALL if preset == "smoke" else {}
