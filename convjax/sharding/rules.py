"""Rules: from the path of a parameter to how it is split over a mesh.

    rules = (("fc[67]/kernel", P(None, "model")), (".*", P()))
    variables = shard(variables, mesh, rules)

The first rule whose pattern is the end of the path decides (a regular expression, from one "/" on),
so the rules of parameters hold for gradients and for what an optimiser remembers of them too. In
place of a `PartitionSpec` a rule may have a function of the array's shape and the mesh. Scalars are
never split and need no rule.

`RULES` has the sets that are ready, by name, and `rules_for` chooses one for a network and a mesh.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, Literal, TypeVar

import jax
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from convjax.models.alexnet import AlexNet
from convjax.models.vit import ViT

Spec = P | Callable[[tuple[int, ...], Mesh], P]
Rules = Sequence[tuple[str, Spec]]
Tree = TypeVar("Tree")


def over_largest(axis: str, *, at_least: int = 2**14) -> Spec:
    """Splits the longest dimension that `axis` divides, of arrays with `at_least` numbers.

    Smaller arrays stay whole: a message for a bias costs more than its memory.
    """

    def spec(shape: tuple[int, ...], mesh: Mesh) -> P:
        parts = mesh.shape.get(axis, 1)
        dividing = [size for size in shape if size % parts == 0]
        if parts == 1 or prod(shape) < at_least or not dividing:
            return P()
        longest = shape.index(max(dividing))
        return P(*(axis if i == longest else None for i in range(longest + 1)))

    return spec


DATA_PARALLEL: Rules = ((".*", P()),)
"""Every device has all parameters, and its share of the examples."""

FSDP: Rules = ((".*", over_largest("fsdp")),)
"""Parameters and what the optimiser remembers are split; `gathered` makes them whole for use.

Zhao et al., 2023, arXiv:2304.11277; Rajbhandari et al., 2020, arXiv:1910.02054.
"""

DENSE_PARALLEL: Rules = (
    ("fc6/kernel", P("fsdp", "model")),
    ("fc6/bias", P("model")),
    ("fc7/kernel", P("model", "fsdp")),
    (".*", over_largest("fsdp")),
)
"""The dense layers of AlexNet, ZFNet and VGG: fc6 by outputs and fc7 by inputs, so that their
hidden units stay where they are computed; a sum over `model` follows, and fc8 is whole."""

FILTER_PARALLEL: Rules = (
    ("conv[^/]*/kernel", P(None, None, None, "model")),
    ("fc[67]/kernel", P(None, "model")),
    ("(conv[^/]*|fc[67])/bias", P("model")),
    (".*", over_largest("fsdp")),
)
"""All layers of AlexNet, ZFNet and VGG by their outputs: each reads all of the one before, so that
devices talk at every layer. Towers avoid that."""

ONE_WEIRD_TRICK: Rules = (
    ("fc6/kernel", P(None, "data")),
    ("fc6/bias", P("data")),
    ("fc7/kernel", P("data", None)),
    (".*", P()),
)
"""The same over the axis that splits the examples: convolutions have a device's own examples, and
the dense layers all of them, which are gathered before fc6 and scattered after fc7.

Krizhevsky, 2014, arXiv:1404.5997, his scheme (a). Images are large and their kernels small; in
dense layers it is the other way round.
"""

TENSOR_PARALLEL_VIT: Rules = (
    ("blocks/attention/qkv/kernel", P(None, "fsdp", "model")),
    ("blocks/attention/qkv/bias", P(None, "model")),
    ("blocks/attention/projection/kernel", P(None, "model", "fsdp")),
    ("blocks/mlp/fc1/kernel", P(None, "fsdp", "model")),
    ("blocks/mlp/fc1/bias", P(None, "model")),
    ("blocks/mlp/fc2/kernel", P(None, "model", "fsdp")),
    (".*", over_largest("fsdp")),
)
"""ViT's blocks: heads and hidden units over `model`, one sum after each branch.

Shoeybi et al., 2019, arXiv:1909.08053. The first axis is that of the stacked blocks.
"""

TOWERS: Rules = (
    ("conv[1-5]/kernel", P(None, None, None, "tower")),
    ("fc[67]/kernel", P(None, "tower")),
    ("(conv[1-5]|fc[67])/bias", P("tower")),
    ("fc8/(kernel|bias)", P()),
)
"""AlexNet's two GPUs: each has its tower's filters and hidden units, and both have fc8."""

RuleSet = Literal[
    "data_parallel",
    "fsdp",
    "dense_parallel",
    "filter_parallel",
    "one_weird_trick",
    "tensor_parallel_vit",
    "towers",
]

RULES: dict[RuleSet, Rules] = {
    "data_parallel": DATA_PARALLEL,
    "fsdp": FSDP,
    "dense_parallel": DENSE_PARALLEL,
    "filter_parallel": FILTER_PARALLEL,
    "one_weird_trick": ONE_WEIRD_TRICK,
    "tensor_parallel_vit": TENSOR_PARALLEL_VIT,
    "towers": TOWERS,
}


def rules_for(network: nn.Module, mesh: Mesh) -> RuleSet:
    """The set that splits `network` over the axes of `mesh` that have more than one device.

    Raises:
      ValueError: no set does that.
    """
    split = {axis for axis, size in mesh.shape.items() if size > 1} - {"data"}
    if "tower" in split:
        fits, rules = isinstance(network, AlexNet) and split == {"tower"}, "towers"
    elif "model" in split and isinstance(network, ViT):
        fits, rules = True, "tensor_parallel_vit"
    elif "model" in split:
        fits, rules = hasattr(network, "dense_width"), "dense_parallel"
    else:
        fits, rules = split <= {"fsdp"}, "fsdp" if split else "data_parallel"
    if not fits:
        sizes = ", ".join(f"{axis}={mesh.shape[axis]}" for axis in sorted(split))
        raise ValueError(
            f"no ready rules split {type(network).__name__} over {sizes}; give rules: "
            + ", ".join(RULES)
        )
    return rules


def specs(tree: Tree, mesh: Mesh, rules: Rules) -> Tree:
    """The `PartitionSpec` of every array of `tree`, a tree of arrays or of their shapes.

    Raises:
      ValueError: a path that no rule matches; or a spec that is longer than its array's shape, has
        an axis that is none of the mesh's, or one that does not divide its dimension.
    """
    return jax.tree.map_with_path(
        lambda path, leaf: _spec(
            jax.tree_util.keystr(path, simple=True, separator="/"), leaf.shape, mesh, rules
        ),
        tree,
    )


def shardings(tree: Tree, mesh: Mesh, rules: Rules) -> Tree:
    """The `NamedSharding` of every array of `tree`; raises as `specs`."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs(tree, mesh, rules), is_leaf=_is_spec
    )


def shard(variables: Tree, mesh: Mesh, rules: Rules) -> Tree:
    """`variables` laid over the mesh as the rules say; raises as `specs`, before a copy is made."""
    return jax.device_put(variables, shardings(variables, mesh, rules))


def gathered(params: Tree, mesh: Mesh, rules: Rules) -> Tree:
    """Parameters as layers use them, for a loss to begin with: no longer split over `fsdp`.

    Their gradients come back split. Left to itself, XLA multiplies by a part of a matrix wherever
    it lies, and gathers activations, which are larger: of four devices that train ViT-B/16 with 128
    images, each sent 9.3 GB in a step, and sends 0.5 GB so. A stack's parameters are gathered
    together, before its scan.

    Args:
      params: laid out by the rules.
      mesh: whose axis `fsdp` it is.
      rules: the parameters'.
    """
    if mesh.shape.get("fsdp", 1) == 1:
        return params

    def whole(path: Any, param: jax.Array, spec: P) -> jax.Array:
        kept = P(*(_without_fsdp(entry) for entry in spec))
        if kept == spec:
            return param
        layer = jax.tree_util.keystr(path[:-1], simple=True, separator="/")
        with jax.named_scope(layer):
            return _relaid(param, NamedSharding(mesh, kept), NamedSharding(mesh, spec))

    return jax.tree.map_with_path(whole, params, specs(params, mesh, rules))


def _without_fsdp(entry: Any) -> Any:
    return tuple(axis for axis in _axes(entry) if axis != "fsdp") or None


def _axes(entry: Any) -> tuple[str, ...]:
    """The mesh's axes in an entry of a `PartitionSpec`."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _relaid(x: jax.Array, there: NamedSharding, back: NamedSharding) -> jax.Array:
    """x laid out as `there`, and its gradient as `back`."""
    return _laid_out(x, there)


_relaid.defvjp(
    lambda x, there, back: (_relaid(x, there, back), None),
    lambda there, back, _, gradient: (_laid_out(gradient, back),),
)


def _laid_out(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    if AxisType.Explicit in sharding.mesh.axis_types:
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)


def _spec(path: str, shape: tuple[int, ...], mesh: Mesh, rules: Rules) -> P:
    if not shape:
        return P()
    for pattern, rule in rules:
        if re.search(rf"(?:^|/)(?:{pattern})$", path):
            spec = rule if isinstance(rule, P) else rule(shape, mesh)
            _check(path, shape, spec, mesh.shape)
            return spec
    patterns = ", ".join(repr(pattern) for pattern, _ in rules)
    raise ValueError(f"no rule matches {path} {list(shape)}: the patterns are {patterns}")


def _check(path: str, shape: tuple[int, ...], spec: P, sizes: Mapping[str, int]) -> None:
    if len(spec) > len(shape):
        raise ValueError(f"{path} {list(shape)} has fewer dimensions than {spec}")
    for size, entry in zip(shape, spec, strict=False):
        axes = _axes(entry)
        for axis in axes:
            if axis not in sizes:
                known = ", ".join(sizes)
                raise ValueError(f"{path}: {spec} names {axis!r}, and the mesh has {known}")
        parts = prod(sizes[axis] for axis in axes)
        if size % parts:
            split = " × ".join(f"{axis}={sizes[axis]}" for axis in axes)
            raise ValueError(f"{path} {list(shape)}: {split} must divide its dimension of {size}")


def _is_spec(node: Any) -> bool:
    return isinstance(node, P)
