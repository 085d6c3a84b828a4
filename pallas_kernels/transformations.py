"""What jax's transformations make of a kernel: a launch itself has no rule for any of them.

grad       `jax.custom_vjp`, in the kernel's own file.
jvp        refused by `prepared`, with the name of the backend that has it.
vmap       `batched`: one launch with one more batch axis, or one after another.
shard_map  `prepared` makes the operands vary over the same axes of the mesh.
jit        on a mesh: `partitioned`, each device launches on its own shard. Without it XLA would
           gather the operands, and every device would do all the work. Where the arrays' types
           say how they are split (explicit axes), `typed` says how the result is.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array


def prepared(*arrays: Array) -> list[Array]:
    """A kernel's operands, as its transformations need them.

    Their forward-mode derivative is an error that says where to find one. Inside a `shard_map` they
    vary over the same axes of the mesh; the gradient of one that did not is summed over the rest.
    """
    varying = [jax.typeof(array).manual_axis_type.varying for array in arrays]
    together = frozenset().union(*varying)
    return [
        _reverse_mode_only(jax.lax.pcast(array, tuple(together - own), to="varying"))
        for array, own in zip(arrays, varying, strict=True)
    ]


@jax.custom_jvp
def _reverse_mode_only(x: Array) -> Array:
    return x


@_reverse_mode_only.defjvp
def _reverse_mode_only_jvp(primals, tangents):
    (x,), (tangent,) = primals, tangents
    return _reverse_mode_only(x), _refused.bind(tangent)


def _refuse(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "kernels have no forward-mode derivative: use backend='xla', which has one"
    )


# Reverse mode transposes this and never runs it; forward mode runs it.
_refused = Primitive("forward_mode_of_a_kernel")
_refused.def_impl(_refuse)
_refused.def_abstract_eval(lambda tangent: tangent)
ad.deflinear2(_refused, lambda cotangent, _: [cotangent])
batching.defvectorized(_refused)
mlir.register_lowering(_refused, _refuse)


def batched(
    launch: Callable[..., Any], rule: Callable[[int, Sequence[bool], Sequence[Any]], Any]
) -> Callable[..., Any]:
    """`launch` with `rule(axis size, which operands have the axis, operands)` for its vmap.

    Every output of `rule` has the axis in front.
    """
    function = jax.custom_batching.custom_vmap(launch)

    @function.def_vmap
    def _(axis_size, in_batched, *operands):
        outputs = rule(axis_size, in_batched, operands)
        return outputs, jax.tree.map(lambda _: True, outputs)

    return function


def one_after_another(
    launch: Callable[..., Any], axis_size: int, in_batched: Sequence[bool], operands: Sequence[Any]
) -> Any:
    """`launch` on each element of a batch in turn."""
    moving = [operand for operand, has in zip(operands, in_batched, strict=True) if has]

    def step(element):
        elements = iter(element)
        return launch(
            *(
                next(elements) if has else operand
                for operand, has in zip(operands, in_batched, strict=True)
            )
        )

    return jax.lax.map(step, moving)


def partitioned(
    launch: Callable[..., Any],
    *,
    operands: Sequence[str],
    outputs: Sequence[str],
    sums_over: Sequence[str] = (),
    added_once: Sequence[int] = (),
    gathers: Sequence[str] = (),
    sizes: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """`launch` as XLA's partitioner may split it: each device runs it on its shards.

    Args:
      launch: a function of arrays, right for any part of them that the axes' names allow.
      operands: the axes of each operand, by name, as "b h w c"; "(g c)" is an axis made of two.
      outputs: the axes of each output.
      sums_over: axes of the operands that some outputs lack; where they are split, the devices'
        sums are added.
      added_once: operands that are added to a sum as they are, as a bias is: where the sum is
        split, one device adds them.
      gathers: axes that no device can do with a part of.
      sizes: of the names in an axis made of two.
    """
    operand_axes, output_axes = ([_split(axes) for axes in each] for each in (operands, outputs))

    def partition(mesh, arguments, results):
        given = jax.tree.leaves((arguments, results))
        placed = _placed([*operand_axes, *output_axes], given, mesh, gathers=gathers, sizes=sizes)
        summed = [
            [name for axis in sums_over if axis not in axes for name in _names(placed.get(axis))]
            for axes in output_axes
        ]

        def shardings(all_axes):
            return [
                NamedSharding(mesh, PartitionSpec(*(placed.get(axis) for axis in axes)))
                for axes in all_axes
            ]

        split_sums = [name for axis in sums_over for name in _names(placed.get(axis))]

        def once(shards):
            if not split_sums:
                return shards
            first = jax.lax.axis_index(tuple(split_sums)) == 0
            return [
                jnp.where(first, shard, jnp.zeros_like(shard)) if each in added_once else shard
                for each, shard in enumerate(shards)
            ]

        def run(*shards):
            # A shard is all that its device knows: its axes are nobody's, whatever the mesh's are.
            around = jax.sharding.get_abstract_mesh()
            types = dict.fromkeys(around.axis_names, AxisType.Auto)
            with jax.sharding.use_abstract_mesh(around.update_axis_types(types)):
                parts, structure = jax.tree.flatten(launch(*once(shards)))
                whole = [
                    jax.lax.psum(part, over) if over else part
                    for part, over in zip(parts, summed, strict=True)
                ]
            return jax.tree.unflatten(structure, whole)

        out = jax.tree.unflatten(jax.tree.structure(results), shardings(output_axes))
        return mesh, run, out, tuple(shardings(operand_axes))

    function = custom_partitioning(lambda *arrays: launch(*arrays))
    # XLA wants them in the order of the rule.
    names = [name.strip("()") for axes in (*operands, *outputs) for name in axes.split(" ")]
    # It has no word for a sum that is of some outputs only, and needs none.
    summed_in_all = [axis for axis in sums_over if all(axis not in axes for axes in output_axes)]
    function.def_partition(
        partition,
        sharding_rule=f"{', '.join(operands)} -> {', '.join(outputs)}",
        reduction_factors=tuple(sorted(summed_in_all, key=names.index)),
        need_replication_factors=tuple(sorted(gathers, key=names.index)),
        **(sizes or {}),
    )
    return function


def typed(
    function: Callable[..., Array],
    arrays: Sequence[Array],
    operands: Sequence[str],
    output: str,
    sizes: Mapping[str, int] | None = None,
) -> Array:
    """`function` of arrays, whose result is split as the axes it shares with the arrays are."""
    types = [jax.typeof(array) for array in arrays]
    meshes = [each.sharding.mesh for each in types if each.sharding.mesh.explicit_axes]
    if not meshes:
        return function(*arrays)
    placed = _placed([_split(each) for each in operands], types, meshes[0], sizes=sizes)
    out = PartitionSpec(*(placed.get(axis) for axis in _split(output)))
    inside: Any = jax.sharding.auto_axes(function, out_sharding=out)
    with jax.sharding.use_abstract_mesh(meshes[0]):
        return inside(*arrays)


def _placed(
    axes: Sequence[Sequence[str]],
    arrays: Sequence[Any],
    mesh: Any,
    *,
    gathers: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The mesh's axes over which each named axis is split: the first array that says so decides.

    Only where the parts are equal: XLA would pad the last one, with numbers that a sum would count.
    And no axis of the mesh splits two: what comes second is gathered. "_" is nobody's name.
    """
    placed: dict[str, Any] = {}
    used: set[str] = set()
    for names, array in zip(axes, arrays, strict=True):
        spec = getattr(array.sharding, "spec", ())  # none where other axes of the mesh are manual
        for name, size, entry in zip(names, array.shape, spec, strict=False):
            if entry is None or name in gathers or name in placed or name == "_":
                continue
            over = _names(entry)
            parts = prod(mesh.shape[axis] for axis in over)
            whole = sizes[name] if sizes and name in sizes else size
            if whole % parts == 0 and used.isdisjoint(over):
                placed[name] = entry
                used.update(over)
    return placed


def _names(entry: Any) -> tuple[str, ...]:
    """The axes of a mesh in an entry of a `PartitionSpec`."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _split(axes: str) -> list[str]:
    """The axes of "b h w (g c)": each of its own name, and the first of those in brackets."""
    names, inside = [], False
    for word in axes.split(" "):
        if not inside:
            names.append(word.removeprefix("("))
        inside = (inside or word.startswith("(")) and not word.endswith(")")
    return names
