"""How a run lies on its mesh: which device holds what of the state and of a batch."""

from dataclasses import dataclass
from typing import cast

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from convjax.data import Batch
from convjax.sharding import BATCH, Rules, gathered, shardings
from convjax.training.state import TrainState


@dataclass(frozen=True)
class Layout:
    """A mesh, and how parameters are split over it."""

    mesh: Mesh
    rules: Rules

    @property
    def whole(self) -> NamedSharding:
        """Of what every device has all of."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """Of a batch's arrays."""
        return NamedSharding(self.mesh, BATCH)

    def shardings_of(self, state: TrainState) -> TrainState:
        """Return the shardings of a state, which may be abstract.

        Raises:
          ValueError: no rule fits an array; names both.
        """
        return shardings(state, self.mesh, self.rules)

    def used(self, params: PyTree) -> PyTree:
        """Return parameters as layers use them; see `convjax.sharding.gathered`."""
        return gathered(params, self.mesh, self.rules)

    def placed(self, batch: Batch) -> Batch:
        """Return a batch, of which each process has its rows, as arrays over all devices."""
        arrays = {
            name: jax.make_array_from_process_local_data(self.batch, rows)
            for name, rows in batch.items()
        }
        return cast(Batch, arrays)
