"""Sets that tensorflow-datasets has prepared as ArrayRecord files, read without TensorFlow.

Nothing here downloads or writes. The records' encoded images are decoded as a folder's are:
tensorflow-datasets' own decoders need TensorFlow, or take OpenCV where it is installed, whose
pixels are not Pillow's.
"""

import difflib
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds
from tensorflow_datasets.core.constants import DATA_DIR
from tensorflow_datasets.core.decode import SkipDecoding
from tensorflow_datasets.core.registered import DatasetNotFoundError

from convjax.data.sources import Example, check_split, decode_image

_PREPARE = (
    "prepare it with `tfds.builder({name!r}, data_dir={folder!r}, file_format='array_record')"
    ".download_and_prepare()` (import tensorflow_datasets as tfds)"
)


def known_names() -> list[str]:
    """Return the sets that tensorflow-datasets has code for, without asking the network."""
    return tfds.list_builders(with_community_datasets=False)


class TfdsSource:
    """One split of a prepared set that has an image and a class label.

    Args:
      name: as `tfds.builder` takes it: `mnist`, `imagenet2012:5.1.0`, `cifar10_corrupted/fog_1`.
      split: one of the set's, or a part of one: `train[:90%]`.
      data_dir: the folder of prepared sets; None for tensorflow-datasets' own choice.

    Raises:
      FileNotFoundError: the set is not prepared; says how to and where it was sought.
      ValueError: an unknown set or split, a set of another kind or in another file format.
    """

    def __init__(self, name: str, split: str, data_dir: Path | None = None) -> None:
        builder: Any = _prepared_builder(name, data_dir)  # its decorators hide its signatures
        check_split(split.partition("[")[0], list(builder.info.splits), name)
        self._name = f"{name} {split}"
        self._image_key, self._label_key = _image_and_label_keys(name, builder.info)
        features = builder.info.features
        height, width, self._channels = features[self._image_key].shape
        self.class_names: tuple[str, ...] = tuple(features[self._label_key].names)
        self.image_shape: tuple[int, int, int] | None = (
            None if height is None or width is None else (height, width, self._channels)
        )
        self._records = builder.as_data_source(
            split, decoders={self._image_key: SkipDecoding()}, file_format="array_record"
        )

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int, /) -> Example:
        record = self._records[index]
        label = int(record[self._label_key])
        if label < 0:
            raise ValueError(f"{self._name}, record {index}: no label; this split has none")
        origin = f"{self._name}, record {index}"
        image = decode_image(record[self._image_key], self._channels, origin)
        return {"image": image, "label": label}


def _prepared_builder(name: str, data_dir: Path | None) -> tfds.core.DatasetBuilder:
    folder = str(data_dir or DATA_DIR)
    try:
        builder = tfds.builder(name, data_dir=folder)
    except DatasetNotFoundError:
        near = difflib.get_close_matches(name, known_names(), n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise ValueError(
            f"tensorflow-datasets knows no set {name!r}, and none is prepared in {folder}{hint}"
        ) from None  # its own message lists a thousand names
    prepare = _PREPARE.format(name=name, folder=folder)
    if not builder.data_path.exists():
        raise FileNotFoundError(f"no set {name!r} in {builder.data_path}; {prepare}")
    formats = {file_format.value for file_format in builder.info.available_file_formats()}
    if "array_record" not in formats:
        raise ValueError(
            f"{builder.data_path} holds {', '.join(sorted(formats))} files, which need TensorFlow; "
            f"move them away and {prepare}"
        )
    return builder


def _image_and_label_keys(name: str, info: tfds.core.DatasetInfo) -> tuple[str, str]:
    match info.features, info.supervised_keys:
        case tfds.features.FeaturesDict() as features, (str(image), str(label)):
            if isinstance(features[image], tfds.features.Image) and isinstance(
                features[label], tfds.features.ClassLabel
            ):
                return image, label
    raise ValueError(
        f"{name} does not pair an image with a class label: features {info.features}, "
        f"supervised keys {info.supervised_keys}"
    )
