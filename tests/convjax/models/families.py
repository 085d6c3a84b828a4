"""A narrow network of each family, to be run in tests, and the smallest image that it takes."""

from convjax import create_model

NARROW = {
    "alexnet": {"widths": (8, 8, 8, 8, 8), "dense_width": 16},
    "alexnet_one_tower": {"widths": (8, 8, 8, 8, 8), "dense_width": 16, "source": "archive"},
    "alexnet_owt": {"widths": (4, 8, 8, 8, 8), "dense_width": 16},
    "zfnet": {"widths": (4, 8, 8, 8, 8), "dense_width": 16},
    "vgg11": {"widths": (4, 4, 8, 8, 8), "dense_width": 16, "pooled": (1, 1)},
    "vgg11_bn": {"widths": (4, 4, 8, 8, 8), "dense_width": 16, "pooled": (1, 1)},
    "googlenet": {"width": 0.25},
    "googlenet_bn": {"width": 0.0625, "auxiliary_heads": False},
    "googlenet_torchvision": {"width": 0.0625},
    "resnet18": {"stage_sizes": (1, 2), "widths": (4, 8)},
    "preact_resnet164_cifar": {"stage_sizes": (2, 1), "widths": (4, 8)},
    "vit_ti16": {"width": 16, "depth": 2, "heads": 2},
    "vit_s32": {"width": 16, "depth": 2, "heads": 2, "pool": "average", "positions": "sincos"},
    "vit_b16": {
        "width": 16,
        "depth": 2,
        "heads": 2,
        "pool": "map",
        "qk_norm": True,
        "layer_scale": 0.1,
        "stochastic_depth": 0.1,
        "activation": "gelu_tanh",
    },
}

SMALLEST = {
    "alexnet": 52,
    "alexnet_one_tower": 52,
    "alexnet_owt": 63,
    "zfnet": 63,
    "vgg11": 32,
    "vgg11_bn": 32,
    "googlenet": 79,
    "googlenet_bn": 47,
    "googlenet_torchvision": 31,
    "resnet18": 1,
    "preact_resnet164_cifar": 1,
    "vit_ti16": 16,
    "vit_s32": 32,
    "vit_b16": 16,
}


def narrow(name, **fields):
    """The network with few channels and, unless told otherwise, three classes."""
    return create_model(name, **({"num_classes": 3} | NARROW[name] | fields))
