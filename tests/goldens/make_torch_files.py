"""Write the small files of torch in `files/`, which our reader is tested on.

    pip install torch==2.14.1 numpy
    python tests/goldens/make_torch_files.py

The same tensors in both of `torch.save`'s formats; what is in them is said by `tests/convjax/
weights/test_torch_file.py` in numbers.
"""

from argparse import Namespace
from collections import OrderedDict
from pathlib import Path

import torch

FOLDER = Path(__file__).with_name("files")


def tensors() -> OrderedDict[str, torch.Tensor]:
    """Views of one storage, and one of each type that weights come in."""
    base = torch.arange(24, dtype=torch.float32)
    matrix = base.reshape(4, 6)
    found = OrderedDict(
        whole=matrix,
        transposed=matrix.T,
        part=matrix[1:3, ::2],
        parameter=torch.nn.Parameter(torch.tensor([0.5, -0.5])),
        scalar=torch.tensor(7),
        empty=torch.zeros(0, 3),
    )
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8):
        found[str(dtype).removeprefix("torch.")] = torch.tensor([1, 2, 3], dtype=dtype)
    found["bool"] = torch.tensor([True, False])
    return found


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    state = torch.nn.BatchNorm1d(2).state_dict()  # has `_metadata`, as all state dicts have
    for name, is_zip in (("zip", True), ("legacy", False)):
        save = {"_use_new_zipfile_serialization": is_zip}
        torch.save(tensors(), FOLDER / f"{name}.pth", **save)
        checkpoint = {
            "epoch": 3,
            "model": {f"module.{key}": value for key, value in state.items()},
            "optimizer": {"state": {}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
            "args": Namespace(model="resnet18", lr=0.1, resume=None),
        }
        torch.save(checkpoint, FOLDER / f"{name}_checkpoint.pth", **save)
    torch.save({"state_dict": state}, FOLDER / "protocol4.pth", pickle_protocol=4)
    torch.save(torch.nn.Linear(1, 1), FOLDER / "module.pth")


if __name__ == "__main__":
    main()
