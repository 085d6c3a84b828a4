"""AlexNet on two GPUs: a network whose towers lie on the devices of a mesh's `tower` axis.

    mesh = make_mesh(tower=2)
    split = Towers(create_model("alexnet"), mesh)
    variables = shard(split.init(key, images), mesh, TOWERS)
    logits = jax.jit(split.apply)(variables, images)

The network itself says where its devices talk (`tower_axis` in `convjax.models.alexnet`); here is
what each of them holds. Examples are split over the axes `data` and `fsdp` beside that. Variables
are those of the network on one device, and so are its numbers, dropout included.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree

from convjax.models.alexnet import AlexNet
from convjax.sharding.mesh import AXES, BATCH
from convjax.sharding.rules import TOWERS, specs


@dataclass(frozen=True)
class Towers:
    """An AlexNet over `mesh`, with the `init`, `shapes` and `apply` of a network.

    Raises:
      ValueError: the mesh's axes are not those of `make_mesh`, its axis `tower` has not as many
        devices as the network has towers, or they do not divide a layer's width.
    """

    network: AlexNet
    mesh: Mesh

    def __post_init__(self) -> None:
        if self.mesh.axis_names != AXES:
            # Dropout counts rows in this order.
            raise ValueError(f"the mesh's axes {self.mesh.axis_names} must be make_mesh's, {AXES}")
        towers, devices = self.network.towers, self.mesh.shape["tower"]
        if devices != towers:
            raise ValueError(f"tower={devices} of the mesh must be the network's towers={towers}")
        for field in ("widths", "dense_width"):
            widths = getattr(self.network, field)
            for width in widths if isinstance(widths, tuple) else (widths,):
                if width % towers:
                    raise ValueError(f"towers={towers} must divide {field}={widths}")

    def init(self, rngs: Any, images: Any, train: bool = False) -> PyTree:
        """The variables of the network on one device: whole, for `shard` to lay out."""
        return self.network.init(rngs, images, train)

    def shapes(self, images: Any) -> PyTree:
        """What `init` would give, as shapes and dtypes."""
        return self.network.shapes(images)

    def apply(
        self,
        variables: PyTree,
        images: Float[Array, "b h w c"],
        train: bool = False,
        *,
        rngs: Mapping[str, Array] | None = None,
        mutable: Any = False,
    ) -> Any:
        """Logits [b, num_classes] in the network's dtype, split over the examples.

        Args:
          variables: whole or laid out, parameters alone.
          images: [b, h, w, c]; data × fsdp of the mesh divide b.
          train: draws dropout from `rngs`.
          rngs: {"dropout": key}.
          mutable: changes the result to (logits, {}) as flax does: nothing here is mutable.
        """
        network = self.network.clone(tower_axis="tower")

        def on_each(variables: PyTree, images: Array, rngs: Mapping[str, Array]) -> Array:
            return network.apply(variables, images, train, rngs=rngs)  # pyright: ignore[reportReturnType]

        variables = {"params": variables["params"]}
        layout = specs(variables, self.mesh, TOWERS)
        logits = jax.shard_map(
            on_each, mesh=self.mesh, in_specs=(layout, BATCH, P()), out_specs=BATCH
        )(variables, images, dict(rngs or {}))
        return logits if mutable is False else (logits, {})
