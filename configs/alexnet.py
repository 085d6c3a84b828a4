"""AlexNet, narrow and with a stem for 28 pixels, learns 10,000 clothes on two CPU cores.

Krizhevsky, Sutskever, Hinton: ImageNet Classification with Deep Convolutional Neural Networks,
2012, with its two towers and the authors' own order (`source="archive"`). Kernels start from
N(0, 0.05²) in place of the paper's 0.01.

    python -m experiments.train --config=configs/alexnet.py --workdir=runs/alexnet

It does not learn yet: after 4 passes (193 seconds) test accuracy is 0.10, as by chance.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the values that differ from `convjax.training.config`'s defaults."""
    config = ConfigDict()
    config.model = {
        "name": "alexnet",
        "fields": {
            "widths": (24, 64, 96, 96, 64),
            "dense_width": 256,
            "stem_size": 5,
            "stem_strides": 1,
            "source": "archive",
            "kernel_stddev": 0.05,
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
    config.epochs = 4
    config.eval_every_epochs = 2.0
    return config
