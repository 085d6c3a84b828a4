"""AlexNet's later form on many GPUs: convolutions split by images, dense layers by their units.

Krizhevsky: One weird trick for parallelizing convolutional neural networks, 2014, arXiv:1404.5997,
his scheme (a): every device gathers all images' features before fc6, has its share of the hidden
units of fc6 and fc7, and returns the sums. One model on one device is trained as well; `mesh.data`
is the number of devices, and `mesh.rules=data_parallel` is the usual way instead.

    python -m experiments.train --config=configs/alexnet_owt.py --workdir=runs/alexnet_owt

ImageNet was not at hand: it has not been trained. What the devices say to each other shows without
it: of four, each sends 77 MiB in a step, and by data parallelism 350 MiB.

    python -m convjax.sharding.plan --config=configs/alexnet_owt.py --mesh=data=4
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the values that differ from `convjax.training.config`'s defaults."""
    config = ConfigDict()
    config.model = {"name": "alexnet_owt"}
    config.data = {
        "name": "tfds:imagenet2012",
        "batch_size": 512,
        "test_batch_size": 512,
        "test_split": "validation",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "augmentation": {"resize": 256, "crop": 224, "flip": True},
    }
    config.optimiser = {
        "name": "sgd",
        "learning_rate": 0.02,
        "momentum": 0.9,
        "weight_decay": 5e-4,
    }
    config.schedule = {"name": "cosine", "warmup": 0.05}
    config.mesh = {"rules": "one_weird_trick"}
    config.epochs = 90
    return config
