"""Our own form as a folder: the tree of `model.init`, as Orbax writes it."""

from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from flax import traverse_util
from jaxtyping import PyTree

from convjax.weights.entries import flat


def read_folder(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an Orbax checkpoint by path, such as "params/conv1/kernel".

    Raises:
      ValueError: the folder is damaged or holds no checkpoint.
      OSError: there is no such folder.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"there is no folder {path}")
    import orbax.checkpoint as ocp  # takes a second, which `import convjax` need not wait for

    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            tree = checkpointer.metadata(path.absolute()).item_metadata.tree
            as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
            arguments = ocp.args.PyTreeRestore(restore_args=as_numpy)
            return flat(checkpointer.restore(path.absolute(), args=arguments))
    except Exception as error:  # Orbax and TensorStore raise whatever the damage leads them to
        raise ValueError(f"{path} cannot be read as a folder of Orbax: {error}") from error


def write_folder(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by path into a new folder, which appears once it is whole.

    Raises:
      FileExistsError: there is something at `path`.
    """
    if path.exists():
        raise FileExistsError(f"{path} is there already; a folder of weights is not replaced")
    import orbax.checkpoint as ocp  # as above

    tree: PyTree = traverse_util.unflatten_dict(dict(arrays), sep="/")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path.absolute(), tree)
