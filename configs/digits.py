"""A small residual network learns scikit-learn's 1,437 handwritten digits of 8×8 pixels.

He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition, 2015, with the network of section
4.2 at 8 layers. The quickest run there is, to try a change on.

    python -m experiments.train --config=configs/digits.py --workdir=runs/digits

Expected: test accuracy 0.98 to 0.99 on the 360 test images (seeds 0, 1: 0.9861 and 0.9944) in 21
seconds of wall time on two CPU cores.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the values that differ from `convjax.training.config`'s defaults."""
    config = ConfigDict()
    config.model = {"name": "resnet8_cifar"}
    config.data = {
        "name": "digits",
        "batch_size": 64,
        "mean": (0.305,),
        "std": (0.376,),
        "augmentation": {"crop_padding": 1},
    }
    config.optimiser = {
        "name": "sgd",
        "learning_rate": 0.1,
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 5e-4,
    }
    config.schedule = {"name": "one_cycle", "warmup": 0.2, "final": 1e-3}
    config.epochs = 8
    config.eval_every_epochs = 4.0
    return config
