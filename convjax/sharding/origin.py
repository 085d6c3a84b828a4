"""Where an operation of a compiled program comes from: its layer, and which pass of the step.

jax names every operation by what was around it when it was traced, and XLA keeps the name:

    jit(train_step)/transpose(jvp(AlexNet))/conv3/conv_general_dilated

`transpose` is the backward pass, `jvp` alone the forward pass, and neither is the rest of the step:
the optimiser and the metrics. Flax puts modules' names and classes there, and `jax.named_scope`
its own.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Pass = Literal["forward", "backward", "update"]

_AROUND = re.compile(r"[\w.\-]+\(|\)")


class Origin(NamedTuple):
    """A layer and a pass; either is "" where the program does not say.

    Attributes:
      layer: modules from the outside in, as in the path of a parameter: "blocks/mlp/fc1"; the
        network's class for what it does between its layers.
      phase: of the step.
    """

    layer: str
    phase: Pass | Literal[""]


NOWHERE = Origin("", "")


def origin_of(op_name: str, params: Mapping[str, Any]) -> Origin:
    """The origin that an operation's name tells.

    Args:
      op_name: as jax made it; "" gives `NOWHERE`.
      params: nested by modules' names, as a network's parameters are: which names are layers'.
    """
    if not op_name:
        return NOWHERE
    return Origin(_layer(op_name, params), _phase(op_name))


def _phase(op_name: str) -> Pass:
    if "transpose(" in op_name:
        return "backward"
    return "forward" if "jvp(" in op_name else "update"


def _layer(op_name: str, params: Mapping[str, Any]) -> str:
    """Follow the name from module to module; what is no module of the last one is skipped."""
    names = re.split(r"[/:]", _AROUND.sub("/", op_name))
    inside: Any = params
    path = []
    for name in names:
        part = inside.get(name)
        if isinstance(part, Mapping):
            inside = part
            path.append(name)
    classes = [name for name in names if name[:1].isupper() and name.isalnum()]
    return "/".join(path or classes[:1])
