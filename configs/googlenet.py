"""GoogLeNet with batch norm, a quarter as wide, learns 10,000 clothes on two CPU cores.

Szegedy et al.: Going Deeper with Convolutions, 2014, with all nine blocks and both auxiliary heads,
whose losses count 0.3 each; conv1 has stride 1, so that the blocks see 7, 4 and 2 pixels.

    python -m experiments.train --config=configs/googlenet.py --workdir=runs/googlenet

Expected: test accuracy 0.85 on the 2,000 test images (seed 0: 0.8540) in 269 CPU seconds, of which
compiling takes about a third, on cores that had much other work.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the values that differ from `convjax.training.config`'s defaults."""
    config = ConfigDict()
    config.model = {
        "name": "googlenet_bn",
        "fields": {"width": 0.25, "stem_strides": 1, "auxiliary_pool": "adaptive"},
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
        "learning_rate": 0.05,
        "momentum": 0.9,
        "weight_decay": 5e-4,
    }
    config.schedule = {"name": "cosine", "warmup": 0.1}
    config.epochs = 3
    config.eval_every_epochs = 3.0
    return config
