"""A call of an operation, as arguments of a command line."""

import argparse
from collections.abc import Callable
from typing import Any, get_args

from pallas_kernels.blocks import Blocks
from pallas_kernels.calls import (
    Attention,
    Call,
    Conv2d,
    Conv2dTranspose,
    CrossEntropy,
    LayerNorm,
    LocalResponseNorm,
    Matmul,
    MatmulFp8,
    MaxPool,
)
from pallas_kernels.conv2d_algorithms import Layout
from pallas_kernels.epilogue import Activation

DTYPES = ("bfloat16", "float16", "float32")

_BLOCKS = "m=128,n=128,k=64,warps=4,stages=3,splits=1"

_PRODUCT = ("bias", "residual", "activation", "precision")

_WINDOWS = ("strides", "padding")

_CONVOLUTION = (
    "input", "kernel", *_WINDOWS, "dilation", "groups", "layout", "algorithm", *_PRODUCT,
)  # fmt: skip

_FIELDS: dict[type[Call], tuple[str, ...]] = {
    Conv2d: _CONVOLUTION,
    Matmul: ("a", "b", *_PRODUCT),
    Attention: ("input", "keys", "causal", "precision"),
    LayerNorm: ("input",),
    LocalResponseNorm: ("input", "size", "groups", "layout"),
    MaxPool: ("input", "window", *_WINDOWS, "layout"),
    CrossEntropy: ("input", "label-smoothing"),
    Conv2dTranspose: (*_CONVOLUTION, "output-size"),
    MatmulFp8: ("a", "b", "bias", "activation"),
}
"""The options that make a call of each operation."""

_NEEDED = ("input", "kernel", "a", "b")

_CALLS: dict[str, type[Call]] = {each.operation: each for each in _FIELDS}

OPERATIONS = tuple(_CALLS)

OPTIONS_OF: dict[str, set[str]] = {
    operation: {*_FIELDS[each], "pass", "blocks", "dump"} for operation, each in _CALLS.items()
}
"""The options that only some operations have, and those of one call."""


def needed(operation: str) -> list[str]:
    """The options without which there is no call."""
    return [name for name in _FIELDS[_CALLS[operation]] if name in _NEEDED]


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds the options of every operation's calls, all of which are None where not given."""
    shape = "x of an operation, y or q; conv2d's, local_response_norm's in --layout's order"
    add = parser.add_argument_group("one call").add_argument
    add("--input", type=numbers(), metavar="N,H,W,C", help=shape)
    add("--strides", type=numbers(2), metavar="DOWN,ACROSS", help="of convolutions, max_pool")
    add("--padding", type=_padding, metavar="SAME|VALID|ROWS,COLUMNS|TOP,BOTTOM,LEFT,RIGHT")
    add("--groups", type=int, help="of conv2d's, local_response_norm's channels")
    add("--layout", choices=get_args(Layout))
    add("--bias", action="store_true", default=None, help="add one number for each channel")
    add("--residual", action="store_true", default=None, help="add an array of the output's shape")
    add("--activation", choices=get_args(Activation), help="apply it to the sum")
    add("--blocks", type=_blocks, metavar=_BLOCKS, help="the forward kernel's")
    add = parser.add_argument_group("conv2d, conv2d_transpose").add_argument
    add("--kernel", type=numbers(4), metavar="KH,KW,C/GROUPS,C_OUT")
    add("--dilation", type=numbers(2), metavar="DOWN,ACROSS")
    add("--algorithm", help="of the Triton backend; by default the one that it chooses")
    add("--output-size", type=numbers(2), metavar="HEIGHT,WIDTH", help="by default the smallest")
    add = parser.add_argument_group("matmul, matmul_fp8").add_argument
    add("--a", type=numbers(), metavar="M,K", help="or a batch of them, BATCH,M,K")
    add("--b", type=numbers(), metavar="K,N", help="or one for each of the batch, BATCH,K,N")
    add = parser.add_argument_group("attention, of --input=BATCH,LENGTH,HEADS,SIZE").add_argument
    add("--keys", type=int, help="of each sequence; by default as many as queries")
    add("--causal", action="store_true", default=None, help="no query sees a later key")
    add = parser.add_argument_group("the others").add_argument
    add("--size", type=int, help="channels of a local_response_norm")
    add("--window", type=numbers(2), metavar="HEIGHT,WIDTH", help="of a max_pool")
    add("--label-smoothing", type=float, help="of cross_entropy of --input=EXAMPLES,CLASSES")


def call_of(options: argparse.Namespace, dtype: str) -> Call:
    """The call that the options make.

    Raises:
      ValueError: a shape has too few or too many sizes.
    """
    kind = _CALLS[options.operation]
    names = {"kernel": "w", "keys": "s", "output-size": "size"}
    names["input"] = {Attention: "q", Conv2dTranspose: "y", CrossEntropy: "logits"}.get(kind, "x")
    given: dict[str, Any] = {}
    for option in _FIELDS[kind]:
        name = option.replace("-", "_")
        if getattr(options, name) is not None and option not in ("algorithm", "precision"):
            given[names.get(option, name)] = getattr(options, name)
    four = kind not in (Matmul, MatmulFp8, LayerNorm, CrossEntropy)
    if four and len(options.input) != 4:
        raise ValueError(f"input={','.join(map(str, options.input))} must be 4 numbers")
    return kind(**given, dtype=dtype)


def numbers(count: int | None = None) -> Callable[[str], tuple[int, ...]]:
    """Reads `count` whole numbers from 1 on."""

    def parse(text: str) -> tuple[int, ...]:
        words = text.split(",")
        if not all(word.isdecimal() and int(word) for word in words):
            raise argparse.ArgumentTypeError(f"{text} must be whole numbers from 1 on")
        if count is not None and len(words) != count:
            raise argparse.ArgumentTypeError(f"{text} must be {count} numbers")
        return tuple(map(int, words))

    return parse


def _padding(text: str) -> Any:
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        if text in ("SAME", "VALID"):
            return text
    elif len(words) in (2, 4):
        numbers = tuple(map(int, words))
        if len(numbers) == 2:
            return tuple((edge, edge) for edge in numbers)
        return numbers[:2], numbers[2:]
    raise argparse.ArgumentTypeError(
        f"{text} must be SAME, VALID, ROWS,COLUMNS or TOP,BOTTOM,LEFT,RIGHT in pixels"
    )


def _blocks(text: str) -> Blocks:
    sizes: dict[str, int] = {}
    for word in text.split(","):
        name, _, size = word.partition("=")
        if name not in Blocks.__dataclass_fields__ or not size.isdecimal():
            raise argparse.ArgumentTypeError(f"{word!r} must be a field of {_BLOCKS}")
        sizes[name] = int(size)
    missing = [name for name in ("m", "n", "k") if name not in sizes]
    if missing:
        raise argparse.ArgumentTypeError(f"{text} must have {', '.join(missing)}")
    try:
        return Blocks(**sizes)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
