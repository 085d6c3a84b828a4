"""ZFNet, narrow and with strides for 28 pixels, learns 10,000 clothes on two CPU cores.

Zeiler, Fergus: Visualizing and Understanding Convolutional Networks, 2013. Its first kernels of 7×7
see every pixel here, and conv2 every place.

    python -m experiments.train --config=configs/zfnet.py --workdir=runs/zfnet

Expected: test accuracy 0.80 on the 2,000 test images (seed 0: 0.7965) in 127 seconds of wall time
on two cores that had other work. From the paper's N(0, 0.01²) it stays at 0.10.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the values that differ from `convjax.training.config`'s defaults."""
    config = ConfigDict()
    config.model = {
        "name": "zfnet",
        "fields": {
            "widths": (24, 64, 96, 96, 64),
            "dense_width": 256,
            "stem_strides": 1,
            "conv2_strides": 1,
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
