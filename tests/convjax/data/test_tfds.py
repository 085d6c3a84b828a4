"""A set prepared by tensorflow-datasets is read without TensorFlow and without a network."""

import json
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from convjax.data import Source, load_source

MAKE_SET = textwrap.dedent(
    '''
    """Prepares tiny_signs in the folder argv[1], with the network cut off and no TensorFlow."""
    import socket, sys
    import numpy as np
    from PIL import Image
    import tensorflow_datasets as tfds

    def cut_off(*args, **kwargs):
        raise RuntimeError("this test has no network")

    socket.socket.connect = socket.getaddrinfo = cut_off

    class TinySigns(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {
                "picture": tfds.features.Image(shape=(None, None, 3)),
                "sign": tfds.features.ClassLabel(names=["stop", "yield"]),
            }
            return tfds.core.DatasetInfo(
                builder=self,
                features=tfds.features.FeaturesDict(features),
                supervised_keys=("picture", "sign"),
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(6), "test": self._generate_examples(3)}

        def _generate_examples(self, count):
            for i in range(count):
                picture = Image.fromarray(np.full((4 + i, 5, 3), 10 * i, np.uint8))
                yield i, {"picture": picture, "sign": i % 2}

    class TinyTexts(TinySigns):
        def _info(self):
            features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _generate_examples(self, count):
            yield 0, {"text": "stop"}

    for builder in (TinySigns, TinyTexts):
        builder(data_dir=sys.argv[1], file_format="array_record").download_and_prepare()
    assert "tensorflow" not in sys.modules
    '''
)
READ_SET = textwrap.dedent(
    """
    import socket, sys

    def cut_off(*args, **kwargs):
        raise RuntimeError("this test has no network")

    socket.socket.connect = socket.getaddrinfo = cut_off

    from convjax.data import Augmentation, load_source, make_dataset

    source = load_source("tfds:tiny_signs", "train", data_dir=sys.argv[1])
    dataset = make_dataset(
        source, batch_size=6, train=True, augmentation=Augmentation(resize=5, crop=4, flip=True)
    )
    assert sorted(dataset.batch(0)["label"].tolist()) == [0, 0, 0, 1, 1, 1]
    try:
        load_source("cifar_10", "train", data_dir=sys.argv[1])
    except ValueError as error:
        print(error)
    print("tensorflow" in sys.modules)
    """
)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    code = tmp_path_factory.mktemp("code") / "make_set.py"
    code.write_text(MAKE_SET)
    subprocess.run([sys.executable, str(code), str(folder)], check=True, capture_output=True)
    return folder


def test_reads_every_record(data_dir):
    source = load_source("tfds:tiny_signs", "train", data_dir=data_dir)
    assert isinstance(source, Source)
    assert source.class_names == ("stop", "yield")
    assert source.num_classes == 2
    assert source.image_shape is None
    examples = [source[index] for index in range(len(source))]
    assert all(example["image"].dtype == np.uint8 for example in examples)
    assert sorted((e["image"].shape, int(e["image"][0, 0, 0]), e["label"]) for e in examples) == [
        ((4 + i, 5, 3), 10 * i, i % 2) for i in range(6)
    ]


def test_without_network_or_tensorflow(data_dir):
    ran = subprocess.run(
        [sys.executable, "-c", READ_SET, str(data_dir)], capture_output=True, text=True, check=True
    )
    complaint, has_tensorflow = ran.stdout.splitlines()
    assert "unknown source 'cifar_10'; did you mean cifar10" in complaint
    assert has_tensorflow == "False"


def test_part_of_a_split(data_dir):
    assert len(load_source("tfds:tiny_signs", "train[:50%]", data_dir=data_dir)) == 3


def test_unknown_split(data_dir):
    with pytest.raises(ValueError, match="tiny_signs has no split 'dev'; it has train, test"):
        load_source("tfds:tiny_signs", "dev", data_dir=data_dir)


def test_set_that_is_not_prepared(data_dir):
    for name in ("tfds:mnist", "mnist"):
        with pytest.raises(
            FileNotFoundError, match=rf"no set 'mnist' in {data_dir}/mnist"
        ) as error:
            load_source(name, "train", data_dir=data_dir)
        assert "download_and_prepare()" in str(error.value)
        assert "file_format='array_record'" in str(error.value)


def test_unknown_set(data_dir):
    with pytest.raises(
        ValueError, match=rf"no set 'mnits'.* {data_dir}; did you mean mnist"
    ) as error:
        load_source("tfds:mnits", "train", data_dir=data_dir)
    assert len(str(error.value)) < 300


def test_set_without_image_and_label(data_dir):
    with pytest.raises(ValueError, match="tiny_texts does not pair an image with a class label"):
        load_source("tfds:tiny_texts", "train", data_dir=data_dir)


def test_set_in_tensorflow_files(data_dir, tmp_path):
    old, new = data_dir / "tiny_signs/1.0.0", tmp_path / "tiny_signs/1.0.0"
    new.mkdir(parents=True)
    for name in ("features.json", "sign.labels.txt"):
        (new / name).write_text((old / name).read_text())
    info = json.loads((old / "dataset_info.json").read_text()) | {"fileFormat": "tfrecord"}
    (new / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(ValueError, match=f"{new} holds tfrecord files, which need TensorFlow"):
        load_source("tfds:tiny_signs", "train", data_dir=tmp_path)
