"""AlexNet, narrow and with a stem for 28 pixels, learns 10,000 clothes on two CPU cores.

Krizhevsky, Sutskever, Hinton: ImageNet Classification with Deep Convolutional Neural Networks,
2012, with its two towers and the authors' own order (`source="archive"`).

Pixels are from 0 to 255 less their mean, as the authors had them: of pixels near 1, what conv1 puts
out is lost beside the biases of 1 that follow, and kernels from N(0, 0.05²) learnt nothing in four
passes. Here they start from N(0, 0.03²) in all layers, for narrow layers sum few numbers.

    python -m experiments.train --config=configs/alexnet.py --workdir=runs/alexnet

Expected: test accuracy 0.81 on the 2,000 test images (seed 0: 0.8060) in 200 CPU seconds, on cores
that had much other work.
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
            "kernel_stddev": 0.03,
        },
    }
    config.data = {
        "name": "fashion_mnist_small",
        "batch_size": 64,
        "mean": (0.2867,),
        "std": (1 / 255,),
        "augmentation": {"flip": True},
    }
    config.optimiser = {
        "name": "sgd",
        "learning_rate": 0.01,
        "momentum": 0.9,
        "weight_decay": 5e-4,
    }
    config.schedule = {"name": "cosine", "warmup": 0.1}
    config.epochs = 4
    config.eval_every_epochs = 2.0
    return config
