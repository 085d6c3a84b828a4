"""The weights of every golden file, by rule: a tensor's values follow from its name and shape.

torch's side (`make_goldens.py`) and ours (`tests/convjax/weights`) fill their state dicts by it, so
that no weights need to be kept. The numbers are PCG64's raw bits, which numpy promises never to
change (its normal draws it does not), as uniform values of unit variance.
"""

import zlib

import numpy as np


def filled(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The tensor called `name` of a torch state dict, float32 (int64 zero for a counter).

    Sizes are such that activations stay of order one: kernels have √2 over the root of their
    fan-in, and what ends a residual branch of a ResNet (`bn2`, `bn3`) is halved.
    """
    if name.endswith("num_batches_tracked"):
        return np.zeros(shape, np.int64)
    values = unit(name, shape)
    if name.endswith("running_var"):
        return 1 + np.float32(0.1) * np.abs(values)
    if len(shape) == 1 and name.endswith(("weight", "gamma")):
        middle = 0.5 if name.endswith(("bn2.weight", "bn3.weight")) else 1.0
        return np.float32(middle) + np.float32(0.1) * values
    if len(shape) in (2, 4):
        fan_in = int(np.prod(shape[1:]))
        return values * np.float32(np.sqrt(2 / fan_in))
    return np.float32(0.1) * values  # biases, running means, class tokens and positions


def unit(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Values of mean 0 and variance 1, uniform, from the bits that the name seeds."""
    count = int(np.prod(shape))
    bits = np.random.PCG64(zlib.crc32(name.encode())).random_raw(-(-count // 2))
    bits = np.asarray(bits, "<u8").view("<u4")[:count] >> 8  # 24 bits: all that a float32 holds
    values = bits.astype(np.float32) * np.float32(2**-23) - 1
    return (values * np.float32(np.sqrt(3))).reshape(shape)


def images() -> np.ndarray:
    """Two images [2, 3, 224, 224] for torch: noise on patches of 16×16 pixels of one colour.

    Of noise alone a deep network sees the mean only, and the two would give the same logits.
    """
    patches = unit("patches", (2, 3, 14, 14)).repeat(16, axis=2).repeat(16, axis=3)
    return (patches + unit("noise", (2, 3, 224, 224))) * np.float32(np.sqrt(0.5))
