"""AlexNet as published, on ImageNet: the run that began it all.

Krizhevsky, Sutskever, Hinton: ImageNet Classification with Deep Convolutional Neural Networks,
2012: 90 passes in batches of 128, SGD with momentum, the learning rate cut by 10 three times. The
paper's 18.2 % top-5 error is of the network with PCA colour noise, which is not here. Pixels are
from 0 to 255 less their mean, as the authors had them: what starts from N(0, 0.01²) needs them so.

    python -m experiments.train --config=configs/alexnet_2012.py --workdir=runs/alexnet_2012

ImageNet was not at hand: it has not been trained. What it needs shows without the images and
without a GPU: 1.3 GiB of memory on one device, and 0.8 GiB on each of the paper's two.

    python -m convjax.sharding.plan --config=configs/alexnet_2012.py --memory=3GB
    python -m convjax.sharding.plan --config=configs/alexnet_2012.py --mesh=tower=2 --memory=3GB
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the values that differ from `convjax.training.config`'s defaults."""
    config = ConfigDict()
    config.model = {"name": "alexnet"}
    config.data = {
        "name": "tfds:imagenet2012",
        "batch_size": 128,
        "test_batch_size": 256,
        "test_split": "validation",
        "mean": (0.485, 0.456, 0.406),
        "std": (1 / 255, 1 / 255, 1 / 255),
        "augmentation": {"resize": 256, "crop": 224, "flip": True},
    }
    config.optimiser = {
        "name": "sgd",
        "learning_rate": 0.01,
        "momentum": 0.9,
        "weight_decay": 5e-4,
    }
    config.schedule = {
        "name": "piecewise",
        "boundaries": (0.35, 0.65, 0.85),
        "factors": (0.1, 0.1, 0.1),
    }
    config.epochs = 90
    return config
