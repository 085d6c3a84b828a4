"""Models by name: each paper's file has a table `VARIANTS`, and this one holds them together."""

import difflib
import fnmatch
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax.typing import Dtype

from convjax.models import (
    alexnet,
    alexnet_owt,
    googlenet,
    preact_resnet,
    resnet,
    vgg,
    vit,
    zfnet,
)
from convjax.models.network import Network
from pallas_kernels import Backend

_FILES = (alexnet, alexnet_owt, zfnet, vgg, googlenet, resnet, preact_resnet, vit)
_MODELS: Mapping[str, Callable[..., Network]] = MappingProxyType(
    {name: variant for file in _FILES for name, variant in file.VARIANTS.items()}
)
_FLAX_FIELDS = {"parent", "name"}


def create_model(
    name: str,
    *,
    num_classes: int | None = None,
    dtype: Dtype = jnp.float32,
    backend: Backend = "auto",
    **fields: Any,
) -> Network:
    """The model called `name`, as a Linen module from images [b, h, w, c] to logits [b, classes].

    Args:
      name: one of `list_models()`.
      num_classes: width of the last layer; None is the paper's (1000; 10 for CIFAR's networks),
        0 leaves the layer out and gives the features before it.
      dtype: compute type; parameters and statistics stay float32.
      backend: of what `pallas_kernels` does; batch norm and average pooling are XLA's.
      **fields: further fields of the model's class, over those of the variant.

    Raises:
      ValueError: an unknown model or field; the message names the nearest ones, and all fields.
    """
    if name not in _MODELS:
        nearest = difflib.get_close_matches(name, _MODELS, n=4, cutoff=0.4)
        hint = f"nearest: {', '.join(nearest)}" if nearest else "see convjax.list_models()"
        raise ValueError(f"unknown model {name!r}; {hint}")
    variant = _MODELS[name]
    _check_fields(name, variant, fields)
    if num_classes is not None:
        if num_classes < 0:
            raise ValueError(f"num_classes={num_classes} must not be negative")
        fields["num_classes"] = num_classes
    return variant(dtype=dtype, backend=backend, **fields)


def list_models(pattern: str = "*") -> list[str]:
    """Names that match a shell pattern such as "resnet*_cifar", in alphabetical order."""
    return sorted(fnmatch.filter(_MODELS, pattern))


def list_fields(name: str) -> dict[str, inspect.Parameter]:
    """The fields of the model called `name`, each with its type and what it is by default."""
    return _fields(_MODELS[name])


def _check_fields(name: str, variant: Callable[..., Network], fields: Mapping[str, Any]) -> None:
    known = _fields(variant)
    for field in fields:
        if field not in known:
            (nearest,) = difflib.get_close_matches(field, known, n=1, cutoff=0.0)
            raise ValueError(
                f"{name} has no field {field!r}; nearest: {nearest}; all: {', '.join(known)}"
            )


def _fields(variant: Callable[..., Network]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(variant).parameters
    return {field: each for field, each in parameters.items() if field not in _FLAX_FIELDS}
