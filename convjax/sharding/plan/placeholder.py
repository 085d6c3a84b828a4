"""Images that are not here: a plan needs to know their shape and classes, and nothing else."""

from dataclasses import dataclass

import numpy as np

from convjax.data import Example, Source, load_source
from convjax.models.registry import list_fields, list_models
from convjax.training.config import RunConfig
from convjax.training.errors import ConfigError


@dataclass(frozen=True)
class Placeholder:
    """A `Source` of black images.

    Attributes:
      image_shape: (h, w, c).
      num_classes: of labels.
      length: how many there are.
    """

    image_shape: tuple[int, int, int]
    num_classes: int
    length: int

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(map(str, range(self.num_classes)))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int, /) -> Example:
        return {"image": np.zeros(self.image_shape, np.uint8), "label": 0}


def source_of(config: RunConfig) -> Source:
    """The run's training images, or in place of what is not on this machine, black ones.

    Those are as large as the augmentation's crop, and of as many classes as the network has by
    default.

    Raises:
      ConfigError: the images are not here and the config does not say how large they are, or it
        names none that there are.
    """
    data = config.data
    try:
        return load_source(data.name, data.train_split, data_dir=data.data_dir)
    except ValueError as error:
        raise ConfigError(f"data.name={data.name!r}: {error}") from error
    except FileNotFoundError:
        side = data.augmentation.crop
        if side is None:
            raise ConfigError(
                f"data.name={data.name!r} is not on this machine: data.augmentation.crop must say "
                "how large its images are"
            ) from None
    if config.model.name not in list_models():
        raise ConfigError(f"unknown model {config.model.name!r}; see python -m convjax.models")
    classes = list_fields(config.model.name)["num_classes"].default
    shape = (side, side, len(data.mean))
    return Placeholder(shape, classes, max(data.batch_size, data.test_batch_size))
