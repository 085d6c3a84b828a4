"""Make the four files of `fashion_mnist_small` from the full Fashion-MNIST.

    python -m convjax.data.fashion_mnist_small.make [--full=DIR] [--out=DIR]

The first 1,000 images of each class in `train-*` and the first 200 of each in `t10k-*` are kept,
in their order. The images are the original's, byte for byte.
"""

import argparse
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8

from convjax.data.idx import read_idx, write_idx
from convjax.data.sources import FASHION_MNIST_FOLDER

PER_CLASS = {"train": 1000, "t10k": 200}


def first_of_each_class(
    labels: UInt8[np.ndarray, " n"], per_class: int
) -> Int[np.ndarray, " kept"]:
    """Return the sorted indices of the first `per_class` examples of each class."""
    firsts = [np.flatnonzero(labels == label)[:per_class] for label in np.unique(labels)]
    return np.sort(np.concatenate(firsts))


def make(full: Path, out: Path) -> None:
    """Write the subset of the idx files in folder `full` into folder `out`."""
    for part, per_class in PER_CLASS.items():
        labels = read_idx(full / f"{part}-labels-idx1-ubyte.gz", ndim=1)
        images = read_idx(full / f"{part}-images-idx3-ubyte.gz", ndim=3)
        kept = first_of_each_class(labels, per_class)
        write_idx(out / f"{part}-labels-idx1-ubyte.gz", labels[kept])
        write_idx(out / f"{part}-images-idx3-ubyte.gz", images[kept])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make fashion_mnist_small.")
    parser.add_argument("--full", type=Path, default=FASHION_MNIST_FOLDER)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args()
    make(arguments.full, arguments.out)
