"""Colour patches of 32×32 pixels, cut from photographs that lie on this machine anyway.

    load_source("colour_patches", "train")      # ten photographs that come with Python packages
    load_source("patches:/photographs", "test") # those in a folder of your own

The label is the photograph that a patch is from, so a network must learn colours, edges and
textures. It is a set to look at first layers with, not one to compare accuracies on.

A photograph is cut into blocks of 96 pixels, and one block in four is for testing, along
diagonals. Patches lie 7 pixels apart, so that they meet a JPEG's grid of 8 in all places, and at
least 4 pixels from the edges of their block: no pixel is in both splits, and 8 lie between them. Of
every photograph as many patches are kept, evenly spaced, as the one with the fewest has.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from convjax.data.augmentation import resize
from convjax.data.sources import ArraySource, check_split, decode_image

PATCH = 32
LONGEST_SIDE = 640  # pixels of a photograph; longer ones are shrunk
_BLOCK, _MARGIN, _SPACING = 96, 4, 7
_SUFFIXES = {".png", ".jpg", ".jpeg"}

# The package and the file of each. Of china and flower the licence is CC BY 2.0, their authors are
# named beside them; the others are in the public domain, by their authors' will (CC0) or NASA's,
# and ihc is without known restrictions.
_PHOTOGRAPHS = (
    ("scikit-learn", "sklearn", "datasets/images/china.jpg"),
    ("scikit-learn", "sklearn", "datasets/images/flower.jpg"),
    ("matplotlib", "matplotlib", "mpl-data/sample_data/grace_hopper.jpg"),
    ("scikit-image", "skimage", "data/astronaut.png"),
    ("scikit-image", "skimage", "data/chelsea.png"),
    ("scikit-image", "skimage", "data/coffee.png"),
    ("scikit-image", "skimage", "data/hubble_deep_field.jpg"),
    ("scikit-image", "skimage", "data/ihc.png"),
    ("scikit-image", "skimage", "data/retina.jpg"),
    ("scikit-image", "skimage", "data/rocket.jpg"),
)


def colour_patches(split: str) -> ArraySource:
    """Open 7,290 patches to train or 2,430 to test, as many of each of the ten photographs.

    Raises:
      FileNotFoundError: a package that has some of them is not installed.
      ValueError: an unknown split.
    """
    check_split(split, ("train", "test"), "colour_patches")
    return _cut_up([_in_package(*place) for place in _PHOTOGRAPHS], split)


def folder_patches(folder: Path, split: str) -> ArraySource:
    """Open the patches of the photographs that lie in `folder` (.png, .jpg, .jpeg).

    Raises:
      FileNotFoundError: no such folder, or fewer than two photographs in it.
      ValueError: an unknown split, or a photograph that cannot be read or is too small.
    """
    check_split(split, ("train", "test"), f"patches:{folder}")
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    paths = sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() in _SUFFIXES and not path.name.startswith(".")
    )
    if len(paths) < 2:
        raise FileNotFoundError(f"{folder} has {len(paths)} photographs; two classes need two")
    return _cut_up(paths, split)


def blocks(
    photograph: UInt8[np.ndarray, "h w 3"], split: str
) -> Iterator[UInt8[np.ndarray, "96 96 3"]]:
    """Yield the whole blocks of one split, row after row; what is over at the far edges is left."""
    height, width, _ = photograph.shape
    for row in range(height // _BLOCK):
        for column in range(width // _BLOCK):
            if (split == "test") == ((row + column) % 4 == 0):
                top, left = row * _BLOCK, column * _BLOCK
                yield photograph[top : top + _BLOCK, left : left + _BLOCK]


def _cut_up(paths: list[Path], split: str) -> ArraySource:
    patches = [_patches(path, split) for path in paths]
    fewest = min(map(len, patches))
    kept = [each[np.arange(fewest) * len(each) // fewest] for each in patches]
    labels = np.repeat(np.arange(len(paths)), fewest)
    return ArraySource(np.concatenate(kept), labels, tuple(path.stem for path in paths))


def _patches(path: Path, split: str) -> UInt8[np.ndarray, "n 32 32 3"]:
    photograph = _shrunk(decode_image(path.read_bytes(), 3, str(path)))
    height, width, _ = photograph.shape
    if min(height, width) < _BLOCK or max(height, width) < 2 * _BLOCK:
        raise ValueError(
            f"{path} of {height}×{width} pixels must have at least two blocks of {_BLOCK}, "
            f"after shrinking to {LONGEST_SIDE}"
        )
    places = range(_MARGIN, _BLOCK - _MARGIN - PATCH + 1, _SPACING)
    return np.stack(
        [
            block[top : top + PATCH, left : left + PATCH]
            for block in blocks(photograph, split)
            for top in places
            for left in places
        ]
    )


def _shrunk(photograph: UInt8[np.ndarray, "h w 3"]) -> UInt8[np.ndarray, "H W 3"]:
    height, width, _ = photograph.shape
    longest = max(height, width)
    if longest <= LONGEST_SIDE:
        return photograph
    return resize(photograph, (height * LONGEST_SIDE // longest, width * LONGEST_SIDE // longest))


def _in_package(distribution: str, package: str, file: str) -> Path:
    """The file's path; the package is found, and not imported, which would take seconds."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            f"no package {package}, which has {Path(file).name}; install the photographs of "
            "colour_patches with `pip install 'convjax[data]'`"
        )
    path = Path(spec.submodule_search_locations[0]) / file
    if not path.is_file():
        raise FileNotFoundError(f"no {path}, which {distribution} should have; install it anew")
    return path
