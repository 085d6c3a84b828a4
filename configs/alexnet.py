"""AlexNet, narrow and with a stem for 28 pixels, learns 10,000 clothes on two CPU cores.

Krizhevsky, Sutskever, Hinton: ImageNet Classification with Deep Convolutional Neural Networks,
2012, with its two towers and the authors' own order and starts (`source="archive"`: kernels of
conv3-5 from N(0, 0.03²)).

    python -m experiments.train --config=configs/alexnet.py --workdir=runs/alexnet

EXPECTED
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the values that differ from `convjax.training.config`'s defaults."""
    config = ConfigDict()
    config.model = {
        "name": "alexnet",
        "fields": {
            "widths": (32, 96, 128, 128, 96),
            "dense_width": 512,
            "stem_size": 5,
            "stem_strides": 1,
            "source": "archive",
        },
    }
    config.data = {
        "name": "fashion_mnist_small",
        "batch_size": 64,
        "mean": (0.2867,),
        "std": (0.3540,),
        "augmentation": {"flip": True},
    }
    config.optimiser = {
        "name": "sgd",
        "learning_rate": 0.02,
        "momentum": 0.9,
        "weight_decay": 5e-4,
    }
    config.schedule = {"name": "cosine", "warmup": 0.1}
    config.epochs = 8
    config.eval_every_epochs = 4.0
    return config
