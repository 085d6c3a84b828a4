"""Three bottlenecks of a ResNet learn 10,000 images of clothes on two CPU cores.

He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition, 2015. Each stage has one block:
inside a scan's loop XLA's CPU takes 15 times as long for the gradients of convolutions.

    python -m experiments.train --config=configs/resnet.py --workdir=runs/resnet

Expected: test accuracy 0.90 on the 2,000 test images (seed 0: 0.8995) in 157 seconds of wall time
on two cores that had other work.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the values that differ from `convjax.training.config`'s defaults."""
    config = ConfigDict()
    config.model = {
        "name": "resnet50",
        "fields": {
            "stage_sizes": (1, 1, 1),
            "widths": (16, 32, 64),
            "stem": "cifar",
            "stem_strides": 2,
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
        "learning_rate": 0.1,
        "momentum": 0.9,
        "weight_decay": 5e-4,
    }
    config.schedule = {"name": "cosine", "warmup": 0.1}
    config.epochs = 6
    config.eval_every_epochs = 3.0
    return config
