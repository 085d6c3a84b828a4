"""Which piece of a network's variables is which tensor of a file.

An `Entry` pairs a piece of ours with a tensor of theirs, and has for each a view that turns it so
that both have the same shape and order. Copying from one view into the other is all that reading
and writing do: nothing is computed, so there and back is exact to the bit.

    conv1.weight [out, in, h, w]   →  theirs: transposed to [h, w, in, out]  =  ours: as it is

A `Table` collects the entries of one network. It knows our shapes, so each layer is named once:

    table.conv("conv1", "features.0")     # kernel and bias, as far as there is one
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

View = Callable[[np.ndarray], np.ndarray]
Shape = tuple[int, ...]

SHOWN = 20


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in a file: its shape there, and views of ours and theirs that agree."""

    shape: Shape
    ours: View
    theirs: View


@dataclass(frozen=True)
class Entry:
    """A piece of our variables and its tensor in a file.

    Attributes:
      path: our array, such as "params/conv2_x/conv1/kernel".
      index: the layer in a stack, whose parameters have a leading axis; None: there is none.
      name: the tensor in the file; several entries may each be a part of it.
      layout: how it lies there.
    """

    path: str
    index: int | None
    name: str
    layout: Layout


@dataclass
class Table:
    """The entries of one network, collected layer by layer.

    Attributes:
      shapes: of all our arrays, by path.
      format: whose names these are, for messages.
      counters: torch's `num_batches_tracked`: written as 0, and nothing that we need when reading.
      heads: how the names of the classifiers' layers begin, by our module's path.
      left_out: beginnings of the names of what the network was made without.
    """

    shapes: Mapping[str, Shape]
    format: str
    entries: list[Entry] = field(default_factory=list)
    counters: list[str] = field(default_factory=list)
    heads: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def add(
        self, path: str, name: str, layout: Callable[[Shape], Layout], index: int | None = None
    ) -> None:
        """Pair the array at `path`, or layer `index` of it, with the tensor `name`."""
        if path not in self.shapes:
            raise ValueError(f"{self.format} has {name}, and the network no {path}")
        shape = self.shapes[path] if index is None else self.shapes[path][1:]
        self.entries.append(Entry(path, index, name, layout(shape)))

    def layer(
        self, module: str, name: str, kernel: Callable[[Shape], Layout], index: int | None = None
    ) -> None:
        """A layer of torch with a weight and perhaps a bias."""
        self.add(f"params/{module}/kernel", f"{name}.weight", kernel, index)
        if f"params/{module}/bias" in self.shapes:
            self.add(f"params/{module}/bias", f"{name}.bias", as_it_is, index)

    def conv(self, module: str, name: str, index: int | None = None) -> None:
        """A convolution of torch."""
        self.layer(module, name, conv_kernel, index)

    def dense(self, module: str, name: str, index: int | None = None) -> None:
        """A linear layer of torch."""
        self.layer(module, name, dense_kernel, index)

    def head(self, module: str, name: str) -> None:
        """A linear layer of torch from features to classes, if the network has one."""
        self.heads[module] = f"{name}."
        if f"params/{module}/kernel" in self.shapes:
            self.dense(module, name)

    def layer_norm(self, module: str, name: str, index: int | None = None) -> None:
        """A layer normalisation of torch."""
        self.add(f"params/{module}/scale", f"{name}.weight", as_it_is, index)
        if f"params/{module}/bias" in self.shapes:
            self.add(f"params/{module}/bias", f"{name}.bias", as_it_is, index)

    def batch_norm(self, module: str, name: str, index: int | None = None) -> None:
        """A batch normalisation of torch, with its statistics and its counter."""
        self.layer_norm(module, name, index)
        self.add(f"batch_stats/{module}/mean", f"{name}.running_mean", as_it_is, index)
        self.add(f"batch_stats/{module}/var", f"{name}.running_var", as_it_is, index)
        self.counters.append(f"{name}.num_batches_tracked")

    def has(self, module: str) -> bool:
        """Whether the network has a module, or an array, of this path under its parameters."""
        path = f"params/{module}"
        return any(known == path or known.startswith(f"{path}/") for known in self.shapes)

    def depth(self, stack: str) -> int:
        """How many layers a stack has."""
        begin = f"params/{stack}/"
        return next(shape[0] for path, shape in self.shapes.items() if path.startswith(begin))

    def tensors(self) -> dict[str, Shape]:
        """Names and shapes in the file, without counters."""
        return {entry.name: entry.layout.shape for entry in self.entries}

    def without_heads(self) -> "Table":
        """The same, but that classifiers are neither read nor missed."""
        modules = tuple(f"params/{module}/" for module in self.heads)
        entries = [entry for entry in self.entries if not entry.path.startswith(modules)]
        left_out = [*self.left_out, *self.heads.values()]
        return replace(self, entries=entries, left_out=left_out)

    def check_whole(self) -> None:
        """Raise a ValueError if an array of ours has no entry: the format has no name for it."""
        nameless = sorted(set(self.shapes) - {entry.path for entry in self.entries})
        if nameless:
            raise ValueError(f"{self.format} has no name for {shortened(nameless)}")


def as_it_is(shape: Shape) -> Layout:
    """The same in both."""
    return Layout(shape, _same, _same)


def conv_kernel(shape: Shape) -> Layout:
    """torch's [out, in, h, w] for our [h, w, in, out]."""
    h, w, c_in, c_out = shape
    return Layout((c_out, c_in, h, w), _same, lambda theirs: theirs.transpose(2, 3, 1, 0))


def dense_kernel(shape: Shape) -> Layout:
    """torch's [out, in] for our [in, out]."""
    return Layout(shape[::-1], _same, np.transpose)


def after_flatten(h: int, w: int) -> Callable[[Shape], Layout]:
    """A linear layer over flattened maps: torch's are [c, h, w], ours [h, w, c]."""

    def layout(shape: Shape) -> Layout:
        features, c_out = shape
        c_in = features // (h * w)
        return Layout(
            (c_out, features),
            lambda ours: ours.reshape(h, w, c_in, c_out),
            lambda theirs: theirs.reshape(c_out, c_in, h, w).transpose(2, 3, 1, 0),
        )

    return layout


def flat_shapes(variables: PyTree) -> dict[str, Shape]:
    """Shapes of arrays, or of what has one, by path: "params/conv1/kernel"."""
    return {path: tuple(leaf.shape) for path, leaf in flat(variables).items()}


def flat(variables: PyTree) -> dict[str, Any]:
    """The arrays of a nested dictionary by their paths, with slashes."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree.leaves_with_path(variables)
    }


def check(table: Table, tensors: Mapping[str, np.ndarray], path: object) -> None:
    """Raise one ValueError that names all tensors of a file that are missing, unknown or unfit."""
    expected = table.tensors()
    missing = sorted(expected.keys() - tensors.keys())
    known = {*expected, *table.counters}
    left_out = tuple(table.left_out)
    unexpected = sorted(
        name for name in tensors if name not in known and not name.startswith(left_out)
    )
    unfit = [
        f"{name} is {tensors[name].dtype}{list(tensors[name].shape)}, not float{list(shape)}"
        for name, shape in sorted(expected.items())
        if name in tensors
        and (tensors[name].shape != shape or not jnp.issubdtype(tensors[name].dtype, jnp.floating))
    ]
    problems = [
        f"{what}: {shortened(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("unfit", unfit))
        if names
    ]
    if problems:
        raise ValueError(f"{path} does not fit the model; {'; '.join(problems)}")


def from_file(table: Table, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Our arrays by path, float32, of tensors that were checked."""
    arrays = {entry.path: np.empty(table.shapes[entry.path], np.float32) for entry in table.entries}
    for entry in table.entries:
        ours = arrays[entry.path]
        ours = ours if entry.index is None else ours[entry.index]
        entry.layout.ours(ours)[...] = entry.layout.theirs(tensors[entry.name])
    return arrays


def to_file(table: Table, arrays: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """The file's tensors by name, float32, of our arrays by path."""
    tensors = {name: np.empty(shape, np.float32) for name, shape in table.tensors().items()}
    on_host = {path: np.ascontiguousarray(array) for path, array in arrays.items()}
    for entry in table.entries:
        ours = on_host[entry.path]
        ours = ours if entry.index is None else ours[entry.index]
        entry.layout.theirs(tensors[entry.name])[...] = entry.layout.ours(ours)
    return tensors | {name: np.zeros((), np.int64) for name in table.counters}


def shortened(names: Sequence[str]) -> str:
    """The names in one line; of more than 20, how many there are beside."""
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _same(array: np.ndarray) -> np.ndarray:
    return array
