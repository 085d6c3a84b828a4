"""Networks, one paper a file, made by name.

create_model("resnet50", num_classes=10) → flax.linen.Module
list_models("resnet*_cifar") → ["resnet1202_cifar", "resnet110_cifar", ...]
"""

from convjax.models.registry import create_model, list_models

__all__ = ["create_model", "list_models"]
