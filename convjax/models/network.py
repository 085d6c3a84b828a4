"""What all models here share: a paper, a head, and how they come to their parameters.

Flax's `init` runs the network to find its parameters, operation by operation. Here the network is
called with shapes only: it declares what is to be drawn, by the initialisers of `convjax.layers`,
and then each array is drawn on its own, from the key folded with a hash of its path. Nothing of the
network is compiled or computed; the numbers are the same inside and outside of jit, and an array's
do not depend on which others there are.

A network in which somebody else's layers were put (`conv=partial(nn.Conv, ...)`), or that was
transformed (`nn.vmap(ResNet, ...)`), is initialised by flax, as any module is.
"""

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast, get_args

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.errors import ScopeParamShapeError
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Float, PyTree

from convjax.layers.initialisers import Draw, declaring, fold_in


@dataclass(frozen=True)
class Paper:
    """Where a network was published."""

    authors: str
    title: str
    year: int
    link: str


class Network(nn.Module):
    """A Flax module from images [b, h, w, c] to logits, quickly initialised.

    Class attributes:
      paper: where it was published.
      head: the name of its last layer, which `num_classes` gives its width.
      training_only: names of parts that evaluation does not call.
    """

    paper: ClassVar[Paper]
    head: ClassVar[str]
    training_only: ClassVar[tuple[str, ...]] = ()

    @nn.nowrap
    def init(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        rngs: Any,
        images: Float[Array, "b h w c"] | jax.ShapeDtypeStruct,
        train: bool = False,
        **options: Any,
    ) -> PyTree:
        """The variables for images of that shape.

        Args:
          rngs: a key, or {"params": key}.
          images: [b, h, w, c], or their shape.
          train: changes nothing.
          **options: as `flax.linen.Module.init` takes them.

        Raises:
          ValueError: there is no key, or the model does not take such images.
        """
        check_key(rngs)
        options |= {"train": True} if train else {}
        declared = self._declared(rngs, images, options)
        if declared is None:
            images = jnp.zeros(images.shape, images.dtype) if _is_shape(images) else images
            return nn.Module.init_with_output(self, rngs, images, **options)[1]
        return _drawn(declared, rngs, ("",))

    @nn.nowrap
    def init_parts(
        self,
        rngs: Any,
        images: Float[Array, "b h w c"] | jax.ShapeDtypeStruct,
        parts: Iterable[str],
    ) -> PyTree:
        """`init` of some parts, such as "fc" or "aux1/fc2"; all else is a shape and a dtype."""
        check_key(rngs)
        declared = self._declared(rngs, images, {})
        variables = self.init(rngs, images) if declared is None else declared
        return _drawn(variables, rngs, tuple(f"{part}/" for part in parts))

    @nn.nowrap
    def shapes(self, images: Float[Array, "b h w c"] | jax.ShapeDtypeStruct) -> PyTree:
        """What `init` would give, as shapes and dtypes: nothing is drawn."""
        key = jax.random.key(0)
        declared = self._declared(key, images, {})
        if declared is None:
            return jax.eval_shape(self.init, key, images)
        return _drawn(declared, key, ())

    @nn.nowrap
    def init_with_output(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, rngs: Any, images: Float[Array, "b h w c"], train: bool = False, **options: Any
    ) -> tuple[Array, PyTree]:
        """(logits, variables): `init`, and what the network then makes of the images."""
        variables = self.init(rngs, images, train, **options)
        options = {"mutable": nn.DenyList("intermediates"), **options}
        keys = dict(rngs) if isinstance(rngs, Mapping) else {"params": rngs, "dropout": rngs}
        logits, _ = self.apply(variables, images, train, rngs=keys, **options)
        return cast(Array, logits), variables

    @nn.nowrap
    def apply(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, variables: Any, *args: Any, **options: Any
    ) -> Any:
        """`flax.linen.Module.apply`.

        Of arrays whose types say how they are split (a mesh with explicit axes), logits are split
        as the images are, and collections that change are whole; inside, XLA decides.

        Raises:
          ValueError: the variables are of images with other channels, or of another network.
        """
        try:
            mesh = _explicit_mesh((variables, args, options.get("images")))
            if mesh is not None and options.get("method") is None:
                return self._apply_inside(mesh, variables, *args, **options)
            return nn.Module.apply(self, variables, *args, **options)
        except ScopeParamShapeError as error:
            images = args[0] if args else options.get("images")
            if images is None:
                raise
            wanted = self.shapes(jax.ShapeDtypeStruct(images.shape, images.dtype))
            raise ValueError(_misfit(wanted, variables, images)) from error

    @nn.nowrap
    def _apply_inside(
        self,
        mesh: AbstractMesh,
        variables: Any,
        images: Float[Array, "b h w c"],
        *args: Any,
        rngs: Any = None,
        mutable: Any = False,
        **options: Any,
    ) -> Any:
        """`apply` with the axes of an explicit mesh left to XLA until the logits."""

        def inside(variables: Any, images: Array, rngs: Any) -> Any:
            options_here = {**options, "rngs": rngs, "mutable": mutable}
            return nn.Module.apply(self, variables, images, *args, **options_here)

        rows = PartitionSpec(*jax.typeof(images).sharding.spec[:1])
        out = rows if mutable is False else (rows, PartitionSpec())
        with jax.sharding.use_abstract_mesh(mesh):
            split: Any = jax.sharding.auto_axes(inside, out_sharding=out)
            return split(variables, images, rngs)

    @nn.nowrap
    def _declared(self, rngs: Any, images: Any, options: dict[str, Any]) -> PyTree[Draw] | None:
        """What is to be drawn, or None where a layer draws on its own."""
        declared: PyTree[Draw] = {}

        def declare(images: Array) -> None:
            nonlocal declared
            with declaring():
                _, declared = nn.Module.init_with_output(self, rngs, images, **options)

        try:
            jax.eval_shape(declare, jax.ShapeDtypeStruct(images.shape, images.dtype))
        except (TypeError, AttributeError):  # of a layer that computes with what it draws
            return None
        return declared if all(map(_is_draw, jax.tree.leaves(declared, is_leaf=_is_draw))) else None


def check_names(**fields: tuple[str, Any]) -> None:
    """Raise a ValueError unless each value is one of its Literal's names."""
    for field, (value, names) in fields.items():
        if value not in get_args(names):
            known = ", ".join(map(repr, get_args(names)))
            raise ValueError(f"{field}={value!r} must be one of {known}")


def check_key(rngs: Any) -> None:
    """Raise a ValueError unless there is a key in `rngs`, or under "params" in it."""
    key = rngs.get("params") if isinstance(rngs, Mapping) else rngs
    dtype, axes = getattr(key, "dtype", None), getattr(key, "ndim", 0)
    is_raw = dtype == jnp.uint32 and axes == 1
    if dtype is None or not (is_raw or jnp.issubdtype(dtype, jax.dtypes.prng_key)):
        raise ValueError(f"key={rngs!r} must be a key, such as jax.random.key(0)")


def _drawn(variables: PyTree, rngs: Any, parts: tuple[str, ...]) -> PyTree:
    """Arrays in place of what is to be drawn in these parts, and shapes of all else."""
    key = rngs["params"] if isinstance(rngs, Mapping) else rngs

    def drawn(path: tuple[Any, ...], leaf: Any) -> Any:
        name = _name(path)
        if not name.partition("/")[2].startswith(parts):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        # A path's 32 bits are the same on every machine.
        return leaf(fold_in(key, zlib.crc32(name.encode()))) if _is_draw(leaf) else leaf

    return jax.tree.map_with_path(drawn, variables, is_leaf=_is_draw)


def _explicit_mesh(arrays: PyTree) -> AbstractMesh | None:
    """The mesh of the first array that lies on one with explicit axes."""
    for array in jax.tree.leaves(arrays):
        if isinstance(array, jax.Array):
            mesh = jax.typeof(array).sharding.mesh
            if mesh.explicit_axes:
                return mesh
    return None


def _misfit(wanted: PyTree, variables: PyTree, images: Array) -> str:
    """How the variables differ from those of the images, by the first that does."""
    channels, given = images.shape[-1], _shapes(variables["params"])
    for path, new in _shapes(wanted["params"]).items():
        old = given.get(path, new)
        if new != old and new == (*old[:-2], channels, *old[-1:]):
            return f"images have channels={channels}, and the variables are for channels={old[-2]}"
        if new != old:
            return f"{path} has shape {old}, and images of shape {images.shape} need {new}"
    return "these are not the model's variables"


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    return {
        _name(path): tuple(leaf.shape) for path, leaf in jax.tree.leaves_with_path(nn.unbox(tree))
    }


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _is_draw(node: Any) -> bool:
    return isinstance(node, Draw)


def _is_shape(images: Any) -> bool:
    return isinstance(images, jax.ShapeDtypeStruct)
