"""A small Vision Transformer learns 10,000 images of clothes on two CPU cores.

Dosovitskiy et al.: An Image is Worth 16x16 Words, 2020, with 16 patches of 7×7 pixels, four blocks
of width 96, sines and cosines for positions, and the average over patches.

    python -m experiments.train --config=configs/vit.py --workdir=runs/vit

Expected: test accuracy 0.84 on the 2,000 test images (seed 0: 0.8370) in 258 CPU seconds, on cores
that had much other work. With 10 passes it reached 0.8520 in 242 CPU seconds on quieter ones.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the values that differ from `convjax.training.config`'s defaults."""
    config = ConfigDict()
    config.model = {
        "name": "vit_ti16",
        "fields": {
            "patch_size": 7,
            "width": 96,
            "depth": 4,
            "heads": 4,
            "pool": "average",
            "positions": "sincos",
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
        "name": "adamw",
        "learning_rate": 2e-3,
        "weight_decay": 0.05,
        "gradient_clip_norm": 1.0,
    }
    config.schedule = {"name": "cosine", "warmup": 0.1}
    config.epochs = 7
    config.eval_every_epochs = 3.5
    return config
