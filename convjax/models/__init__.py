"""Networks, one paper a file, made by name.

create_model("resnet50", num_classes=10) → flax.linen.Module
list_models("resnet*_cifar") → ["resnet1202_cifar", "resnet110_cifar", ...]
"""

from convjax.models.head import replace_head
from convjax.models.network import Network, Paper
from convjax.models.registry import create_model, list_models

__all__ = ["Network", "Paper", "create_model", "list_models", "replace_head"]
