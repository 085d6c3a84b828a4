"""Weights of other libraries, and our own: `load_weights` and `save_weights`.

| source, target | networks | files |
|---|---|---|
| `torchvision` | AlexNet (2014), VGG, GoogLeNet, ResNet, ViT | `.safetensors`, `.pth` |
| `timm` | ResNet, ViT | `.safetensors`, `.pth` |
| `big_vision` | ViT, also of vision_transformer | `.npz` |
| `convjax` | all | `.safetensors`, folders of Orbax's |

Names and layouts (`entries`, `tables` and the `*_names` beside) are apart from files (`files`,
`torch_file`, `orbax_folder`). No pickle is ever executed.
"""

from convjax.weights.load import load_weights
from convjax.weights.save import save_weights
from convjax.weights.tables import Format

__all__ = ["Format", "load_weights", "save_weights"]
