"""Patches are where they should be, in one split only, and as many of each photograph."""

import builtins
import importlib.util

import numpy as np
import pytest
from PIL import Image

from convjax.data import Source, load_source
from convjax.data.patches import blocks


def numbered(height, width):
    """A photograph whose colours are the numbers of its pixels, row after row."""
    number = np.arange(height * width).reshape(height, width)
    return np.stack([number >> 16, number >> 8 & 255, number & 255], axis=-1).astype(np.uint8)


def numbers(image):
    red, green, blue = np.moveaxis(image.astype(int), -1, 0)
    return (red << 16) + (green << 8) + blue


def write(folder, **sizes):
    for name, size in sizes.items():
        Image.fromarray(numbered(*size)).save(folder / f"{name}.png")
    return f"patches:{folder}"


# colour_patches


@pytest.mark.parametrize(
    ("split", "per_class", "means"),
    [("train", 729, (119.4, 93.2, 84.1)), ("test", 243, (115.4, 87.7, 77.4))],
)
def test_colour_patches(split, per_class, means):
    source = load_source("colour_patches", split)
    assert isinstance(source, Source)
    assert source.image_shape == (32, 32, 3)
    assert source.class_names == (
        "china", "flower", "grace_hopper", "astronaut", "chelsea", "coffee", "hubble_deep_field",
        "ihc", "retina", "rocket",
    )  # fmt: skip
    assert np.bincount(source.labels).tolist() == [per_class] * 10
    # Decoders of JPEG may differ by a level.
    np.testing.assert_allclose(source.images.mean((0, 1, 2)), means, atol=0.3)


def test_colour_patches_need_the_packages_that_have_them(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "skimage" else found(name)
    )
    message = r"no package skimage, which has astronaut\.png; .* `pip install 'convjax\[data\]'`"
    with pytest.raises(FileNotFoundError, match=message):
        load_source("colour_patches", "train")


def test_a_package_without_its_photographs_is_named(monkeypatch, tmp_path):
    class Empty:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: Empty)
    with pytest.raises(FileNotFoundError, match=r"china\.jpg, which scikit-learn should have"):
        load_source("colour_patches", "test")


def test_packages_are_not_imported(monkeypatch):
    usual = builtins.__import__

    def refuse(name, *arguments, **keywords):
        assert name.split(".")[0] not in ("sklearn", "skimage", "matplotlib")
        return usual(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert len(load_source("colour_patches", "test")) == 2430


# how they are cut


def test_one_block_in_four_is_for_testing():
    photograph = numbered(300, 400)  # 3×4 blocks; the last 12 rows and 16 columns are left
    corners = {
        split: [divmod(int(numbers(block)[0, 0]), 400) for block in blocks(photograph, split)]
        for split in ("train", "test")
    }
    assert corners["test"] == [(0, 0), (96, 288), (192, 192)]
    assert corners["train"] == [
        (0, 96), (0, 192), (0, 288), (96, 0), (96, 96), (96, 192), (192, 0), (192, 96), (192, 288),
    ]  # fmt: skip


def test_patches_of_a_block_lie_seven_apart_and_four_from_its_edges(tmp_path):
    source = load_source(write(tmp_path, a=(96, 192), b=(96, 192)), "train")
    assert len(source) == 2 * 81
    corners = [
        divmod(int(numbers(source[index]["image"])[0, 0]), 192)
        for index in range(len(source))
        if source[index]["label"] == 0
    ]
    places = range(4, 61, 7)  # to 60 + 32 = 92 of 96
    assert corners == [(row, 96 + column) for row in places for column in places]


def test_no_pixel_is_in_both_splits_and_eight_lie_between(tmp_path):
    name = write(tmp_path, a=(288, 384), b=(288, 384))
    seen = {}
    for split in ("train", "test"):
        images = load_source(name, split).images
        seen[split] = np.zeros((288, 384), bool)
        seen[split].flat[numbers(images).ravel()] = True
    assert seen["train"].sum() == 9 * 88**2
    assert seen["test"].sum() == 3 * 88**2
    near = np.zeros_like(seen["test"])
    for row, column in np.argwhere(seen["test"]):
        near[max(0, row - 8) : row + 9, max(0, column - 8) : column + 9] = True
    assert not (near & seen["train"]).any()


def test_as_many_patches_of_each_photograph_evenly_spaced(tmp_path):
    source = load_source(write(tmp_path, small=(96, 192), large=(192, 288)), "train")
    assert source.class_names == ("large", "small")
    assert np.bincount(source.labels).tolist() == [81, 81]
    large = numbers(source.images[source.labels == 0])[:, 0, 0]
    # 5 blocks of 81, of which every fifth patch is kept, from the first on.
    assert [divmod(int(each), 288) for each in large[:3]] == [(4, 100), (4, 135), (11, 107)]
    assert divmod(int(large[-1]), 288) == (96 + 60, 192 + 32)


def test_a_long_photograph_is_shrunk_to_640_pixels(tmp_path):
    for name in ("a", "b"):
        Image.fromarray(np.full((960, 1280, 3), 77, np.uint8)).save(tmp_path / f"{name}.png")
    source = load_source(f"patches:{tmp_path}", "train")  # 480×640 pixels: 5×6 blocks
    assert len(source) == 2 * 22 * 81
    assert (source.images == 77).all()


# what is wrong with a folder


def test_folders_that_cannot_be_cut(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no folder {tmp_path}/none"):
        load_source(f"patches:{tmp_path}/none", "train")
    name = write(tmp_path, one=(96, 192))
    (tmp_path / "notes.txt").write_text("not a photograph")
    (tmp_path / "._one.png").write_text("what a Mac leaves behind")
    with pytest.raises(FileNotFoundError, match="has 1 photographs; two classes need two"):
        load_source(name, "train")
    write(tmp_path, square=(150, 150))
    with pytest.raises(ValueError, match=r"square\.png of 150×150 pixels must have at least two"):
        load_source(name, "train")
    (tmp_path / "square.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"square\.png is not a readable image"):
        load_source(name, "train")


def test_unknown_split_and_useless_data_dir(tmp_path):
    for name in ("colour_patches", f"patches:{tmp_path}"):
        with pytest.raises(ValueError, match="has no split 'validation'; it has train, test"):
            load_source(name, "validation")
        with pytest.raises(ValueError, match=f"data_dir=.* has no meaning for {name}"):
            load_source(name, "train", data_dir=tmp_path)
