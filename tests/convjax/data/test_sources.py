"""Every source gives the images it should, and says clearly what is missing or damaged."""

import gzip
import hashlib
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from convjax.data import ArraySource, Source, load_source
from convjax.data.fashion_mnist_small import make
from convjax.data.idx import read_idx, write_idx
from convjax.data.sources import FASHION_MNIST_FOLDER, decode_image

SMALL = Path(make.__file__).parent
SHA256 = {
    name: digest
    for digest, name in (
        line.split()
        for line in """\
1ecc7f90b9d150b40c359acf80cfec4990bfbcc1db9fe346f886d9e7fcae0000 train-images-idx3-ubyte.gz
036b3a9440a684e6f8117e910b5dad249f9165250c2ae2341f2bfd8482381497 train-labels-idx1-ubyte.gz
e60ede7714c657ced2d723c33140572b5476b46df34b385a6e176b0757dc4318 t10k-images-idx3-ubyte.gz
e6d25f5f3e85bb315a10172898c1c8f69ce52c4f9306c5821205c821bfca8847 t10k-labels-idx1-ubyte.gz
""".splitlines()
    )
}


def encode(array, image_format="PNG", mode=None, **options):
    buffer = io.BytesIO()
    image = Image.fromarray(array)
    (image if mode is None else image.convert(mode)).save(buffer, image_format, **options)
    return buffer.getvalue()


def labels_of(source):
    return np.array([source[index]["label"] for index in range(len(source))])


# fashion_mnist_small and fashion_mnist


def test_shipped_files_are_the_published_subset():
    for name, digest in SHA256.items():
        assert hashlib.sha256((SMALL / name).read_bytes()).hexdigest() == digest
    assert sum((SMALL / name).stat().st_size for name in SHA256) == 5_233_288


def test_licence_is_kept_beside_the_data():
    licence = (SMALL / "LICENSE").read_text()
    assert "Copyright © 2017 Zalando SE" in licence
    assert "Permission is hereby granted, free of charge" in licence


@pytest.mark.parametrize(
    ("split", "per_class", "mean", "first_labels"),
    [
        ("train", 1000, 73.10, [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]),
        ("test", 200, 72.75, [9, 2, 1, 1, 6, 1, 4, 6, 5, 7]),
    ],
)
def test_fashion_mnist_small(split, per_class, mean, first_labels):
    source = load_source("fashion_mnist_small", split)
    assert isinstance(source, Source)
    assert source.image_shape == (28, 28, 1)
    assert source.num_classes == 10
    assert source.class_names[0] == "T-shirt/top"
    assert source.class_names[9] == "Ankle boot"
    labels = labels_of(source)
    assert np.bincount(labels).tolist() == [per_class] * 10
    assert labels[:10].tolist() == first_labels
    images = np.stack([source[index]["image"] for index in range(len(source))])
    assert images.dtype == np.uint8
    assert images.mean() == pytest.approx(mean, abs=0.01)


def test_make_keeps_the_first_of_each_class_in_order(tmp_path, monkeypatch):
    labels = np.array([1, 0, 1, 1, 0, 0, 1], np.uint8)
    images = np.arange(7, dtype=np.uint8).reshape(7, 1, 1)
    (tmp_path / "out").mkdir()
    for part in ("train", "t10k"):
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", labels)
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", images)
    monkeypatch.setattr(make, "PER_CLASS", {"train": 2, "t10k": 1})
    make.make(tmp_path, tmp_path / "out")
    kept = read_idx(tmp_path / "out/train-images-idx3-ubyte.gz", ndim=3)
    assert kept.ravel().tolist() == [0, 1, 2, 4]
    assert read_idx(tmp_path / "out/train-labels-idx1-ubyte.gz", ndim=1).tolist() == [1, 0, 1, 0]
    assert read_idx(tmp_path / "out/t10k-labels-idx1-ubyte.gz", ndim=1).tolist() == [1, 0]


@pytest.mark.skipif(not FASHION_MNIST_FOLDER.exists(), reason="dataset-fashion-mnist not installed")
def test_shipped_files_can_be_made_again(tmp_path):
    make.make(FASHION_MNIST_FOLDER, tmp_path)
    for name in SHA256:  # packed bytes are zlib's choice; what is in them is not
        assert gzip.decompress((tmp_path / name).read_bytes()) == gzip.decompress(
            (SMALL / name).read_bytes()
        )


def test_full_fashion_mnist_reads_the_same_format_elsewhere():
    source = load_source("fashion_mnist", "test", data_dir=SMALL)
    assert len(source) == 2000
    assert source.class_names[8] == "Bag"


def test_full_fashion_mnist_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="apt install dataset-fashion-mnist") as error:
        load_source("fashion_mnist", "train", data_dir=tmp_path)
    assert str(tmp_path / "train-images-idx3-ubyte.gz") in str(error.value)


def test_damaged_fashion_mnist_is_named(tmp_path):
    write_idx(tmp_path / "t10k-images-idx3-ubyte.gz", np.zeros((3, 28, 28), np.uint8))
    write_idx(tmp_path / "t10k-labels-idx1-ubyte.gz", np.zeros(2, np.uint8))
    with pytest.raises(ValueError, match=rf"{tmp_path}: .* damaged: 3 images but 2 labels"):
        load_source("fashion_mnist", "test", data_dir=tmp_path)
    write_idx(tmp_path / "t10k-labels-idx1-ubyte.gz", np.array([0, 1, 10], np.uint8))
    with pytest.raises(ValueError, match=r"labels from 0 to 10 must be in \[0, 10\)"):
        load_source("fashion_mnist", "test", data_dir=tmp_path)


# digits


def test_digits():
    train, test = load_source("digits", "train"), load_source("digits", "test")
    assert (len(train), len(test)) == (1437, 360)
    assert np.bincount(labels_of(test)).tolist() == [36] * 10
    assert np.bincount(labels_of(train)).tolist() == [
        142, 146, 141, 147, 145, 146, 145, 143, 138, 144,
    ]  # fmt: skip
    assert train.image_shape == test.image_shape == (8, 8, 1)
    assert test.class_names == tuple("0123456789")
    # The file's first zero, first row: levels 0 0 5 13 9 1 0 0 of 16.
    assert test[0]["label"] == 0
    assert test[0]["image"][0, :, 0].tolist() == [0, 0, 80, 207, 143, 16, 0, 0]
    assert max(train[index]["image"].max() for index in range(100)) == 255


def test_digits_splits_share_nothing_and_leave_nothing_out():
    from sklearn.datasets import load_digits

    sources = [load_source("digits", split) for split in ("train", "test")]
    images = [source[i]["image"].tobytes() for source in sources for i in range(len(source))]
    original = np.rint(load_digits().data * 255 / 16).astype(np.uint8)
    assert sorted(images) == sorted(row.tobytes() for row in original)


# folder


@pytest.fixture
def flowers(tmp_path):
    """Two classes, one image a class and a split but for two tulips to train."""
    for number, place in enumerate(
        ("train/tulip/b.png", "train/tulip/a.PNG", "train/daisy/c.jpg", "val/tulip/d.jpeg",
         "val/daisy/e.png")
    ):  # fmt: skip
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        array = np.full((4 + number, 6, 3), 40 * number, np.uint8)
        path.write_bytes(encode(array, "PNG" if path.suffix.lower() == ".png" else "JPEG"))
    (tmp_path / "train/tulip/notes.txt").write_text("not an image")
    (tmp_path / "train/tulip/._a.png").write_text("what a Mac leaves behind")
    (tmp_path / "train/.thumbnails").mkdir()
    return tmp_path


def test_folder(flowers):
    source = load_source(f"folder:{flowers}", "train")
    assert isinstance(source, Source)
    assert source.class_names == ("daisy", "tulip")
    assert source.num_classes == 2
    assert source.image_shape is None
    assert labels_of(source).tolist() == [0, 1, 1]
    assert [source[index]["image"].shape for index in range(3)] == [(6, 6, 3), (5, 6, 3), (4, 6, 3)]
    assert source[1]["image"].dtype == np.uint8
    assert source[1]["image"].max() == 40


def test_folder_test_split_is_val_where_there_is_no_test(flowers):
    test, validation = (load_source(f"folder:{flowers}", split) for split in ("test", "validation"))
    assert len(test) == len(validation) == 2
    np.testing.assert_array_equal(test[0]["image"], validation[0]["image"])
    (flowers / "val").rename(flowers / "test")
    assert len(load_source(f"folder:{flowers}", "test")) == 2
    with pytest.raises(ValueError, match="no split 'validation'; it has train, test"):
        load_source(f"folder:{flowers}", "validation")


def test_folder_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no folder {tmp_path}/none; expected"):
        load_source(f"folder:{tmp_path}/none", "train")
    with pytest.raises(FileNotFoundError, match=f"no folder {tmp_path}/train"):
        load_source(f"folder:{tmp_path}", "train")
    (tmp_path / "train").mkdir()
    with pytest.raises(ValueError, match=f"{tmp_path}/train has no class folders"):
        load_source(f"folder:{tmp_path}", "train")
    (tmp_path / "train/daisy").mkdir()
    with pytest.raises(ValueError, match=f"{tmp_path}/train/daisy has no images"):
        load_source(f"folder:{tmp_path}", "train")


def test_folder_splits_must_have_the_same_classes(flowers):
    (flowers / "val/rose").mkdir()
    with pytest.raises(ValueError, match=r"must have the same class folders; .* has rose"):
        load_source(f"folder:{flowers}", "test")
    assert len(load_source(f"folder:{flowers}", "train")) == 3


def test_folder_names_an_unreadable_image(flowers):
    whole = (flowers / "train/daisy/c.jpg").read_bytes()
    for content in (b"", b"plain text", whole[: len(whole) // 2]):
        (flowers / "train/daisy/c.jpg").write_bytes(content)
        with pytest.raises(ValueError, match=r"train/daisy/c\.jpg is not a readable image"):
            load_source(f"folder:{flowers}", "train")[0]


# decoding


def test_decoding_gives_rgb_whatever_the_mode():
    colours = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255]]], np.uint8)
    grey = np.array([[0, 100, 255]], np.uint8)
    transparent = np.dstack([colours, np.array([[0, 128, 255]], np.uint8)])
    np.testing.assert_array_equal(decode_image(encode(colours), 3, "x"), colours)
    np.testing.assert_array_equal(decode_image(encode(transparent), 3, "x"), colours)
    np.testing.assert_array_equal(decode_image(encode(colours, mode="P"), 3, "x"), colours)
    np.testing.assert_array_equal(decode_image(encode(grey), 3, "x"), np.dstack([grey] * 3))
    np.testing.assert_array_equal(decode_image(encode(grey), 1, "x"), grey[..., None])
    bits = decode_image(encode(grey, mode="1"), 3, "x")
    assert bits[0, :, 0].tolist()[::2] == [0, 255]


def test_decoding_a_palette_with_transparency_does_not_warn():
    colours = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255]]], np.uint8)
    encoded = encode(colours, mode="P", transparency=bytes([0] * 256))
    np.testing.assert_array_equal(decode_image(encoded, 3, "x"), colours)


def test_decoding_refuses_what_eight_bits_cannot_hold():
    deep = encode(np.array([[0, 300, 65535]], np.uint16))
    with pytest.raises(ValueError, match=r"scan\.png is not a readable image: mode I;16 has more"):
        decode_image(deep, 3, "scan.png")
    with pytest.raises(ValueError, match=r"scan\.png: channels=2 must be 1 or 3"):
        decode_image(encode(np.zeros((1, 1), np.uint8)), 2, "scan.png")


def test_decoding_names_a_damaged_png():
    pixels = np.random.default_rng(0).integers(0, 256, (30, 30, 3), np.uint8)
    encoded = encode(pixels)
    garbled = encoded[:1000] + bytes(500) + encoded[1500:]
    for damaged in (encoded[:1000], garbled):
        with pytest.raises(ValueError, match=r"leaf\.png is not a readable image"):
            decode_image(damaged, 3, "leaf.png")


# names and splits


@pytest.mark.parametrize("name", ["fashion_mnist_small", "fashion_mnist", "digits"])
def test_unknown_split_names_those_there_are(name):
    with pytest.raises(ValueError, match=f"{name} has no split 'validation'; it has train, test"):
        load_source(name, "validation")


def test_array_source_is_checked():
    with pytest.raises(ValueError, match="1 images but 2 labels"):
        ArraySource(np.zeros((1, 2, 2, 1), np.uint8), np.zeros(2, np.int64), ("a",))
    with pytest.raises(ValueError, match="labels from -1 to 0 must be in"):
        ArraySource(np.zeros((2, 2, 2, 1), np.uint8), np.array([-1, 0]), ("a",))


def test_import_is_light():
    heavy = ("tensorflow", "tensorflow_datasets", "sklearn", "grain")
    code = (
        "import sys, convjax.data; convjax.data.load_source('fashion_mnist_small', 'test')[0]; "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["digits", "fashion_mnist_small", "folder:/pictures"])
def test_a_data_dir_that_would_be_ignored_is_an_error(name, tmp_path):
    with pytest.raises(ValueError, match=f"data_dir=.* has no meaning for {name}"):
        load_source(name, "train", data_dir=tmp_path)
