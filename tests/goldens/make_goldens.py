"""Write the golden files beside this script: what torchvision's and timm's networks compute.

    pip install torch==2.14.1 torchvision==0.29.1 timm==1.0.31 numpy
    python tests/goldens/make_goldens.py [NAME ...]

torch is no dependency of this library, so its figures are made once, by this script, from weights
and images that `rule.py` gives. Each file holds, for one network:

    entries           JSON {name: shape}, the state dict in torch's order
    logits            [2, 1000] of two images of 224×224 pixels, evaluation mode
    and for those of TRAINED, in training mode with dropout off and labels [3, 7], computed in
    float64 (a gradient through many batch norms is uncertain by 0.3 % in float32):
    train_logits      [2, 1000]; `aux1` and `aux2` for GoogLeNet's auxiliary heads
    loss              mean cross-entropy, plus 0.3 of that of each auxiliary head
    parameters        JSON [name, ...]
    gradient_norms    the Euclidean norm of the loss's gradient in each of them
"""

import json
import sys
from pathlib import Path

import numpy as np
import rule
import timm
import torch
import torchvision
from torch.nn import functional

TORCHVISION = (
    "alexnet",
    *(f"vgg{depth}{norm}" for depth in (11, 13, 16, 19) for norm in ("", "_bn")),
    "googlenet",
    *(f"resnet{depth}" for depth in (18, 34, 50, 101, 152)),
    "vit_b_16",
    "vit_b_32",
    "vit_l_16",
    "vit_l_32",
    "vit_h_14",
)
SMALL = "vit_small_patch16_224"
TIMM = {
    **{
        name: (name, {})
        for name in (
            "vit_tiny_patch16_224",
            "vit_small_patch16_224",
            "vit_small_patch32_224",
            "vit_base_patch16_224",
            "vit_base_patch32_224",
            "resnet18",
            "resnet50",
            "resnet101",
        )
    },
    "vit_small_qk_norm": (SMALL, {"qk_norm": True, "init_values": 1e-5}),
    "vit_small_map": (SMALL, {"global_pool": "map", "class_token": False}),
    "vit_small_avg": (SMALL, {"global_pool": "avg", "class_token": False, "fc_norm": False}),
    "vit_small_avg_fc_norm": (SMALL, {"global_pool": "avg", "class_token": False}),
}
TRAINED = (
    "torchvision_alexnet",
    "torchvision_googlenet",
    "torchvision_resnet18",
    "timm_vit_tiny_patch16_224",
)


def main(names: list[str]) -> None:
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    every = [f"torchvision_{name}" for name in TORCHVISION] + [f"timm_{name}" for name in TIMM]
    for name in names or every:
        path = Path(__file__).with_name(f"{name}.npz")
        np.savez_compressed(path, **golden(name))
        print(path.name, path.stat().st_size, flush=True)


def golden(name: str) -> dict[str, np.ndarray]:
    model = made(name)
    state = model.state_dict()
    with torch.no_grad():
        for entry, tensor in state.items():
            tensor.copy_(torch.from_numpy(rule.filled(entry, tuple(tensor.shape))))
    images = torch.from_numpy(rule.images())
    with torch.inference_mode():
        logits = model.eval()(images)
    shapes = {entry: list(tensor.shape) for entry, tensor in state.items()}
    found = {"entries": text(shapes), "logits": logits.numpy()}
    return found | (trained(model.double(), images.double()) if name in TRAINED else {})


def made(name: str) -> torch.nn.Module:
    source, _, name = name.partition("_")
    if source == "timm":
        name, fields = TIMM[name]
        return timm.create_model(name, **fields)
    fields = {"init_weights": False, "aux_logits": True} if name == "googlenet" else {}
    return torchvision.models.get_model(name, **fields)


def trained(model: torch.nn.Module, images: torch.Tensor) -> dict[str, np.ndarray]:
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    labels = torch.tensor([3, 7])
    output = model(images)
    found = {}
    if isinstance(output, tuple):
        found = {"aux1": output.aux_logits1, "aux2": output.aux_logits2}
        output = output.logits
    found = {"train_logits": output, **found}
    loss = functional.cross_entropy(output, labels)
    for head in ("aux1", "aux2"):
        if head in found:
            loss = loss + 0.3 * functional.cross_entropy(found[head], labels)
    loss.backward()
    parameters = dict(model.named_parameters())
    norms = [parameter.grad.double().norm().item() for parameter in parameters.values()]
    return {
        **{key: value.detach().float().numpy() for key, value in found.items()},
        "loss": np.float32(loss.item()),
        "parameters": text(list(parameters)),
        "gradient_norms": np.asarray(norms, np.float32),
    }


def text(value: object) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


if __name__ == "__main__":
    main(sys.argv[1:])
