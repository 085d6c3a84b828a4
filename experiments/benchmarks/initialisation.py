"""How long `init` takes for each model, beside the constructor of its peer in torchvision or timm.

    python -m experiments.benchmarks.initialisation [--peer=PYTHON] [MODEL ...]

`--peer` is a Python that has torch, torchvision and timm; without one only our own times are
printed. Both sides draw all parameters on the CPU; each model is made once in the order given, in
one process, so the first has the compiler's time for all. The floor is the time in which memory
takes as many numbers.
"""

import json
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from convjax import create_model, list_models
from experiments.command import OneLineParser

PEERS = {
    "alexnet_owt": "torchvision/alexnet",
    "vgg11": "torchvision/vgg11",
    "vgg16": "torchvision/vgg16",
    "vgg19": "torchvision/vgg19",
    "googlenet_torchvision": "torchvision/googlenet",
    "resnet18": "torchvision/resnet18",
    "resnet34": "torchvision/resnet34",
    "resnet50": "torchvision/resnet50",
    "resnet101": "torchvision/resnet101",
    "resnet152": "torchvision/resnet152",
    "vit_ti16": "timm/vit_tiny_patch16_224",
    "vit_s16": "timm/vit_small_patch16_224",
    "vit_b16": "timm/vit_base_patch16_224",
    "vit_b32": "timm/vit_base_patch32_224",
    "vit_l16": "timm/vit_large_patch16_224",
    "vit_h14": "timm/vit_huge_patch14_224",
}

_CONSTRUCT = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
import timm, torchvision
seconds = {}
for peer in sys.argv[1:]:
    library, name = peer.split("/")
    make = torchvision.models.get_model if library == "torchvision" else timm.create_model
    started = time.perf_counter()
    make(name)
    seconds[peer] = time.perf_counter() - started
print(json.dumps(seconds))
"""


def main() -> None:
    """Time them and print a table."""
    parser = OneLineParser(__doc__ or "")
    parser.add_argument("--peer", help="a Python with torch, torchvision and timm")
    parser.add_argument("models", nargs="*", default=list(PEERS))
    options = parser.parse_args()
    for name in options.models:
        if name not in list_models():
            parser.error(f"unknown model {name}; convjax.list_models() names them")
    ours = {name: _init(name) for name in options.models}
    peers = {} if options.peer is None else _construct(options.peer, options.models)
    print(f"{'model':24}{'numbers':>14}{'init, s':>10}{'peer, s':>10}{'floor, s':>10}")
    for name, (numbers, seconds) in ours.items():
        peer = f"{peers[PEERS[name]]:10.2f}" if PEERS.get(name) in peers else f"{'':10}"
        print(f"{name:24}{numbers:14,}{seconds:10.2f}{peer}{_write(numbers):10.2f}")


def _init(name: str) -> tuple[int, float]:
    """The number of parameters, and the seconds until they are there."""
    model, images = create_model(name), jnp.zeros((1, 224, 224, 3))
    started = time.perf_counter()
    variables = jax.block_until_ready(model.init(jax.random.key(0), images))
    seconds = time.perf_counter() - started
    return sum(leaf.size for leaf in jax.tree.leaves(variables)), seconds


def _construct(python: str, models: list[str]) -> dict[str, float]:
    peers = [PEERS[name] for name in models if name in PEERS]
    command = [python, "-c", _CONSTRUCT, *peers]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {python} cannot make the peers: {error}")
    return json.loads(done.stdout)


def _write(numbers: int) -> float:
    started = time.perf_counter()
    np.empty(numbers, np.float32).fill(1)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
