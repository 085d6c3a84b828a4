"""Networks over a mesh of devices: the mesh, rules for parameters, and AlexNet's two GPUs."""

from convjax.sharding.mesh import AXES, BATCH, make_mesh, process_rows
from convjax.sharding.rules import (
    DATA_PARALLEL,
    DENSE_PARALLEL,
    FILTER_PARALLEL,
    FSDP,
    ONE_WEIRD_TRICK,
    RULES,
    TENSOR_PARALLEL_VIT,
    TOWERS,
    Rules,
    RuleSet,
    Spec,
    gathered,
    over_largest,
    rules_for,
    shard,
    shardings,
    specs,
)
from convjax.sharding.towers import Towers

__all__ = [
    "AXES",
    "BATCH",
    "DATA_PARALLEL",
    "DENSE_PARALLEL",
    "FILTER_PARALLEL",
    "FSDP",
    "ONE_WEIRD_TRICK",
    "RULES",
    "TENSOR_PARALLEL_VIT",
    "TOWERS",
    "RuleSet",
    "Rules",
    "Spec",
    "Towers",
    "gathered",
    "make_mesh",
    "over_largest",
    "process_rows",
    "rules_for",
    "shard",
    "shardings",
    "specs",
]
