"""Small networks of every family, with random variables."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from convjax.models import create_model
from convjax.models.vit import ViT
from convjax.weights import load_weights

VIT = {"patch_size": 16, "width": 12, "heads": 3, "depth": 2, "num_classes": 5}
NARROW = {"num_classes": 5, "dense_width": 8}

# Name (none: ViT), fields, side of the images, formats.
SMALL = {
    "resnet18": (
        "resnet18",
        {"widths": (4, 8), "stage_sizes": (1, 2), "num_classes": 5},
        32,
        "torchvision timm",
    ),
    "resnet50": (
        "resnet50",
        {"widths": (4, 4), "stage_sizes": (1, 3), "num_classes": 5},
        32,
        "torchvision timm",
    ),
    "alexnet_owt": ("alexnet_owt", {"widths": (64, 4, 4, 4, 4), **NARROW}, 64, "torchvision"),
    "vgg13": ("vgg13", {"widths": (4, 4, 4, 8, 8), **NARROW}, 32, "torchvision"),
    "vgg11_bn": ("vgg11_bn", {"widths": (4, 4, 4, 4, 8), **NARROW}, 32, "torchvision"),
    "googlenet": ("googlenet_torchvision", {"width": 0.05, "num_classes": 5}, 64, "torchvision"),
    "vit": ("", VIT, 48, "torchvision timm big_vision"),
    "vit_average": ("", {**VIT, "pool": "average"}, 48, "timm big_vision"),
    "vit_map": ("", {**VIT, "pool": "map"}, 48, "timm big_vision"),
    "vit_qk_norm": ("", {**VIT, "qk_norm": True, "layer_scale": 0.1}, 48, "timm"),
    "vit_norm_pooled": ("", {**VIT, "pool": "average", "norm_pooled": True}, 48, "timm"),
    "vit_sincos": ("", {**VIT, "positions": "sincos", "pool": "map"}, 48, "big_vision"),
    "alexnet": ("alexnet", {"widths": (8, 8, 8, 8, 8), **NARROW}, 96, ""),
    "zfnet": ("zfnet", {"widths": (4, 4, 4, 4, 4), **NARROW}, 128, ""),
    "preact": (
        "preact_resnet164_cifar",
        {"stage_sizes": (2, 1), "widths": (4, 8), "num_classes": 5},
        32,
        "",
    ),
}
ENDINGS = {
    "torchvision": (".safetensors", ".pth"),
    "timm": (".safetensors", ".pth"),
    "big_vision": (".npz",),
    "convjax": (".safetensors", ""),
}


def small(name: str, *, channels: int = 3, size: tuple[int, int] | None = None, **more):
    """A small network and its variables, every number random and of its own."""
    kind, fields, side, _ = SMALL[name]
    model = partial(create_model, kind) if kind else ViT
    model = model(**{**fields, **more})
    images = jax.ShapeDtypeStruct((1, *(size or (side, side)), channels), jnp.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)
    rng = np.random.default_rng(0)
    draw = lambda leaf: jnp.asarray(rng.normal(size=leaf.shape).astype(np.float32))  # noqa: E731
    return model, jax.tree.map(draw, shapes)


def read(model, path, *, source, **options):
    """`load_weights` into a model that computes as the source does."""
    if source == "big_vision":
        model = model.clone(activation="gelu_tanh")
    return load_weights(model, path, source=source, **options)


def assert_same(ours, theirs):
    """The same tree of the same bits."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for path, leaf in jax.tree.leaves_with_path(ours):
        other = theirs
        for key in path:
            other = other[key.key]
        assert leaf.shape == other.shape, path
        assert leaf.dtype == other.dtype == jnp.float32, path
        assert np.asarray(leaf).tobytes() == np.asarray(other).tobytes(), path
