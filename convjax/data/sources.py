"""Labelled images by name, read at random and without TensorFlow.

    load_source("fashion_mnist_small", "train")    # shipped with the package
    load_source("fashion_mnist", "train")          # Debian's package dataset-fashion-mnist
    load_source("digits", "test")                  # scikit-learn's
    load_source("colour_patches", "train")         # of photographs that come with packages
    load_source("patches:/data/holiday", "train")  # of the photographs in a folder
    load_source("folder:/data/flowers", "train")   # a folder of class folders
    load_source("tfds:imagenet2012", "validation") # prepared by tensorflow-datasets

Opening a source reads no more than it must; what is missing or damaged is named in the error.
"""

import difflib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypedDict, runtime_checkable

import numpy as np
from jaxtyping import Integer, UInt8
from PIL import Image

from convjax.data.idx import read_idx

FASHION_MNIST_FOLDER = Path("/usr/share/datasets/fashion-mnist")
FASHION_MNIST_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)

_DIGITS_TEST_PER_CLASS = 36
_SUFFIXES = {".png", ".jpg", ".jpeg"}


class Example(TypedDict):
    """One labelled image."""

    image: UInt8[np.ndarray, "h w c"]
    label: int


@runtime_checkable
class Source(Protocol):
    """One split of a labelled set, with random access from several threads at once.

    Attributes:
      class_names: the names of the labels 0, 1, 2, ...
      image_shape: (h, w, c) of every image, or None where sizes vary.
    """

    @property
    def class_names(self) -> tuple[str, ...]: ...

    @property
    def image_shape(self) -> tuple[int, int, int] | None: ...

    @property
    def num_classes(self) -> int: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...


def load_source(name: str, split: str, *, data_dir: str | Path | None = None) -> Source:
    """Open one split of a named set.

    Args:
      name: `fashion_mnist_small`, `fashion_mnist`, `digits`, `colour_patches`, `patches:PATH`,
        `folder:PATH`, `tfds:NAME`, or the bare NAME of a set that tensorflow-datasets knows.
      split: `train` or `test`; `validation` where the set has it.
      data_dir: where to look for `fashion_mnist` or a prepared tensorflow-datasets set, in place
        of their usual folders.

    Raises:
      FileNotFoundError: the set is not on this machine; says how to get it and where it was sought.
      ValueError: an unknown name or split, a damaged set, or a `data_dir` that would be ignored.
    """
    folder = None if data_dir is None else Path(data_dir).expanduser()
    kind, _, rest = name.partition(":")
    if folder and (name in _SHIPPED or kind in ("folder", "patches")):
        raise ValueError(f"data_dir={str(folder)!r} has no meaning for {name}: leave it out")
    if name in _SHIPPED:
        return _SHIPPED[name](split)
    if name == "fashion_mnist":
        return _fashion_mnist(split, folder)
    if kind == "folder" and rest:
        return FolderSource(Path(rest).expanduser(), split)
    if kind == "patches" and rest:
        from convjax.data.patches import folder_patches  # it builds on what is here

        return folder_patches(Path(rest).expanduser(), split)
    from convjax.data import tfds  # a second of imports that other sets need not wait for

    if kind == "tfds" and rest:
        return tfds.TfdsSource(rest, split, folder)
    known = tfds.known_names()
    if name in known:
        return tfds.TfdsSource(name, split, folder)
    built_in = ("fashion_mnist", *_SHIPPED)
    near = difflib.get_close_matches(name, [*built_in, *known], n=3)
    raise ValueError(
        f"unknown source {name!r}; "
        + (f"did you mean {', '.join(near)}? " if near else "")
        + f"There are {', '.join(built_in)}, folder:PATH, patches:PATH and tfds:NAME"
    )


def decode_image(encoded: bytes, channels: int, origin: str) -> UInt8[np.ndarray, "h w c"]:
    """Decode a PNG or JPEG file to grey (`channels=1`) or RGB (3); transparency is dropped.

    Raises:
      ValueError: not an image, cut short, or of more than 8 bits a channel; names its `origin`.
    """
    if channels not in (1, 3):
        raise ValueError(f"{origin}: channels={channels} must be 1 or 3")
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"mode {image.mode} has more than 8 bits a channel")
            # By way of RGBA: a palette's transparency would be warned about otherwise.
            opaque = image.convert("RGBA") if image.mode == "P" else image
            pixels = np.asarray(opaque.convert("RGB" if channels == 3 else "L"))
    except Exception as error:  # Pillow's readers raise whatever the damaged bytes lead them to
        raise ValueError(f"{origin} is not a readable image: {error}") from error
    return pixels.reshape(*pixels.shape[:2], channels)


def check_split(split: str, splits: Sequence[str], name: str) -> None:
    """Raise a ValueError naming the splits there are unless `split` is one of them."""
    if split not in splits:
        raise ValueError(f"{name} has no split {split!r}; it has {', '.join(splits)}")


@dataclass(frozen=True, eq=False)
class ArraySource:
    """A set that lives in memory.

    Raises:
      ValueError: images and labels differ in number, or a label has no class name.
    """

    images: UInt8[np.ndarray, "n h w c"]
    labels: Integer[np.ndarray, " labels"]
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise ValueError(f"{len(self.images)} images but {len(self.labels)} labels")
        if len(self.labels) and not 0 <= self.labels.min() <= self.labels.max() < self.num_classes:
            raise ValueError(
                f"labels from {self.labels.min()} to {self.labels.max()} must be in "
                f"[0, {self.num_classes})"
            )

    @property
    def image_shape(self) -> tuple[int, int, int]:
        _, height, width, channels = self.images.shape
        return height, width, channels

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int, /) -> Example:
        return {"image": self.images[index], "label": int(self.labels[index])}


class FolderSource:
    """Images in class folders: `root/SPLIT/CLASS/*.png`, `.jpg` or `.jpeg`, decoded to RGB.

    Labels follow the sorted names of the folders in `root/train`. The split `test` is read from
    `root/test`, or `root/val` where there is no test folder (ImageNet's habit); `validation` from
    `root/val`. Hidden files and folders are passed over. Only names are read on opening, in sorted
    order; images when asked for.

    Raises:
      FileNotFoundError: no such folder.
      ValueError: an unknown split, no classes, a class without images, or classes that are not
        those of `root/train`.
    """

    image_shape = None

    def __init__(self, root: Path, split: str) -> None:
        if not root.is_dir():
            raise FileNotFoundError(f"no folder {root}; expected {root}/train/CLASS/*.png or *.jpg")
        folders = {"train": root / "train", "test": root / "test", "validation": root / "val"}
        if not folders["test"].is_dir():
            folders["test"] = root / "val"
        found = [name for name, folder in folders.items() if folder.is_dir()]
        if "train" not in found:
            raise FileNotFoundError(f"no folder {root}/train")
        check_split(split, found, str(root))
        self.class_names = _folder_names(root / "train")
        if not self.class_names:
            raise ValueError(f"{root}/train has no class folders")
        folder = folders[split]
        if different := set(_folder_names(folder)) ^ set(self.class_names):
            raise ValueError(
                f"{folder} and {root}/train must have the same class folders; "
                f"only one of them has {', '.join(sorted(different))}"
            )
        self._paths: list[Path] = []
        self._labels: list[int] = []
        for label, name in enumerate(self.class_names):
            paths = [path for path in _visible(folder / name) if path.suffix.lower() in _SUFFIXES]
            if not paths:
                raise ValueError(f"{folder / name} has no images (.png, .jpg, .jpeg)")
            self._paths += paths
            self._labels += [label] * len(paths)

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int, /) -> Example:
        path = self._paths[index]
        return {
            "image": decode_image(path.read_bytes(), 3, str(path)),
            "label": self._labels[index],
        }


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _folder_names(folder: Path) -> tuple[str, ...]:
    return tuple(path.name for path in _visible(folder) if path.is_dir())


def _read_fashion_mnist(folder: Path, split: str, name: str) -> ArraySource:
    check_split(split, ("train", "test"), name)
    part = {"train": "train", "test": "t10k"}[split]
    images = read_idx(folder / f"{part}-images-idx3-ubyte.gz", ndim=3)
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz", ndim=1)
    try:
        return ArraySource(images[..., np.newaxis], labels, FASHION_MNIST_CLASSES)
    except ValueError as error:
        raise ValueError(f"{folder}: the {part} files are damaged: {error}") from error


def _fashion_mnist_small(split: str) -> ArraySource:
    return _read_fashion_mnist(
        Path(__file__).parent / "fashion_mnist_small", split, "fashion_mnist_small"
    )


def _fashion_mnist(split: str, data_dir: Path | None) -> ArraySource:
    try:
        return _read_fashion_mnist(data_dir or FASHION_MNIST_FOLDER, split, "fashion_mnist")
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"no {error.filename}; install the full Fashion-MNIST with "
            "`apt install dataset-fashion-mnist`, or name its folder with data_dir"
        ) from error


def _digits(split: str) -> ArraySource:
    """Scikit-learn's 1,797 digits of 8×8: 1,437 to train and 360 to test.

    The test split is 36 of each class, evenly spaced in the file, whose writers come one after the
    other; the 17 grey levels are spread over 0-255.
    """
    check_split(split, ("train", "test"), "digits")
    from sklearn.datasets import load_digits  # seconds of imports that other sets need not wait for

    levels, labels = load_digits(return_X_y=True)
    images = np.rint(levels * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    is_test = np.zeros(len(labels), bool)
    for label in range(10):
        members = np.flatnonzero(labels == label)
        evenly = np.arange(_DIGITS_TEST_PER_CLASS) * len(members) // _DIGITS_TEST_PER_CLASS
        is_test[members[evenly]] = True
    chosen = is_test if split == "test" else ~is_test
    return ArraySource(images[chosen], labels[chosen], tuple("0123456789"))


def _colour_patches(split: str) -> ArraySource:
    from convjax.data.patches import colour_patches  # it builds on what is here

    return colour_patches(split)


_SHIPPED: dict[str, Callable[[str], ArraySource]] = {
    "fashion_mnist_small": _fashion_mnist_small,
    "digits": _digits,
    "colour_patches": _colour_patches,
}
