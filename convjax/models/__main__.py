"""What models there are and what they cost; for one model, its layers.

    python -m convjax.models                 # all of them
    python -m convjax.models 'vgg*' --json
    python -m convjax.models alexnet         # its layers, and the fields of `create_model`

Costs are of one image, of 224×224 pixels (32×32 for CIFAR's networks), or of --size. A MAC is one
multiplication and addition; activations are the numbers that convolutions and dense layers put out;
the last share is that of MACs in matrix products: dense layers, attention, and convolutions whose
windows do not overlap (1×1, or patches).
"""

import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from flax.typing import Dtype
from rich.console import Console
from rich.table import Table

from convjax.models.cost import LayerCost, layer_costs, model_cost
from convjax.models.network import Network
from convjax.models.registry import create_model, list_fields, list_models
from pallas_kernels.command_line import OneLineParser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table that is asked for, and return the exit status."""
    parser = OneLineParser("python -m convjax.models", __doc__)
    parser.add_argument("pattern", nargs="?", default="*", help="names, as in a shell")
    parser.add_argument("--json", action="store_true", help="for a program")
    parser.add_argument("--size", type=int, help="sides of the image, in pixels")
    options = parser.options(arguments)
    try:
        _print(options.pattern, options.size, as_json=options.json)
        sys.stdout.flush()
    except ValueError as error:
        parser.error(str(error))
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _print(pattern: str, size: int | None, *, as_json: bool) -> None:
    names = _names(pattern)
    if size is not None and size < 1:
        raise ValueError(f"--size={size} must be at least 1")
    if len(names) == 1 and not as_json:
        _print_layers(names[0], size)
        _print_fields(names[0])
        return
    rows = [_summary(name, size) for name in names]
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        _print_models(rows)


def _names(pattern: str) -> list[str]:
    """The models that match, the oldest papers first."""
    names = list_models(pattern)
    if not names:
        create_model(pattern)  # raises, and names the nearest
    return sorted(names, key=lambda name: create_model(name).paper.year)


def _model(name: str, size: int | None) -> tuple[Network, tuple[int, int, int]]:
    side = size or (32 if name.endswith("_cifar") else 224)
    return create_model(name), (side, side, 3)


def _summary(name: str, size: int | None) -> dict[str, Any]:
    model, image_shape = _model(name, size)
    cost = model_cost(model, image_shape)
    layers, parts = cost.layers, cost.parameters
    macs = sum(layer.macs for layer in layers)
    auxiliary = sum(parts.get(part, 0) for part in model.training_only)
    return {
        "name": name,
        "parameters": sum(parts.values()) - auxiliary,
        "auxiliary_parameters": auxiliary,
        "gmacs": macs / 1e9,
        "activations": sum(layer.activations for layer in layers),
        "matrix_product_share": sum(layer.macs for layer in layers if layer.is_product) / macs,
        "image": image_shape,
        "paper": f"{model.paper.authors}: {model.paper.title}",
        "year": model.paper.year,
        "link": model.paper.link,
    }


def _print_models(rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, header_style="bold")
    table.add_column("model", no_wrap=True)
    for heading in ("parameters", "GMACs", "activations", "products"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("paper", no_wrap=True)
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['parameters']:,}",
            f"{row['gmacs']:.3f}",
            f"{row['activations']:,}",
            f"{row['matrix_product_share']:.1%}",
            f"{row['paper'].partition(',')[0].partition(':')[0]} {row['year']}",
        )
    _console().print(table)


def _print_layers(name: str, size: int | None) -> None:
    model, image_shape = _model(name, size)
    layers = layer_costs(model, image_shape)
    towers = getattr(model, "towers", 1)
    table = Table(box=None, header_style="bold", show_footer=True)
    macs, total = sum(layer.macs for layer in layers), sum(layer.parameters for layer in layers)
    table.add_column("layer", "", no_wrap=True)
    table.add_column("operation", no_wrap=True)
    for heading, footer in (
        ("output", ""),
        ("parameters", f"{total:,}"),
        ("MACs", f"{macs:,}"),
        ("", ""),
    ):
        table.add_column(heading, footer, justify="right", no_wrap=True)
    if towers > 1:
        table.add_column("per tower", justify="right", no_wrap=True)
        table.add_column("reads", no_wrap=True)
    for layer in layers:
        table.add_row(*_cells(layer, macs), *(_tower_cells(layer, towers) if towers > 1 else ()))
    console = _console()
    console.print(f"{name}: {model.paper.authors}, {model.paper.title}, {model.paper.year}")
    console.print(table)


def _print_fields(name: str) -> None:
    table = Table(box=None, header_style="bold")
    for heading in ("field", "type", "default"):
        table.add_column(heading, no_wrap=True)
    for field in list_fields(name).values():
        table.add_row(field.name, _type(field.annotation), _value(field.default))
    console = _console()
    console.print()
    console.print(table)


def _type(annotation: Any) -> str:
    """A type as it is written, but that names are spelt out and functions are "callable"."""
    if annotation == Dtype:
        return "dtype"
    if get_origin(annotation) is Literal:
        return " | ".join(map(repr, get_args(annotation)))
    if get_origin(annotation) in (Union, UnionType):
        return " | ".join(map(_type, get_args(annotation)))
    if get_origin(annotation) is Callable:
        return "callable"
    return "None" if annotation is type(None) else inspect.formatannotation(annotation)


def _value(value: Any) -> str:
    if isinstance(value, partial):
        return f"{value.func.__name__}(…)"
    return getattr(value, "__name__", repr(value))


def _console() -> Console:
    """As wide as the terminal; a file or a pipe is as wide as it takes."""
    console = Console(markup=False)
    return console if console.is_terminal else Console(width=160, markup=False)


def _cells(layer: LayerCost, macs: int) -> tuple[str, ...]:
    copies = f"{layer.copies} × " if layer.copies > 1 else ""
    return (
        layer.name or "(the network's own)",
        copies + layer.operation,
        "×".join(map(str, layer.output)),
        f"{layer.parameters:,}",
        f"{layer.macs:,}",
        f"{layer.macs / macs:.1%}",
    )


def _tower_cells(layer: LayerCost, towers: int) -> tuple[str, str]:
    """How many filters each of AlexNet's towers has, and whose maps they see."""
    if "groups" in layer.operation:
        reads = "its own tower"
    elif layer.name == "conv1":
        reads = "the image"
    else:
        reads = "both towers"
    split = layer.output[-1] // towers if layer.name != "fc8" else layer.output[-1]
    return f"{split:,}", reads


if __name__ == "__main__":
    sys.exit(main())
