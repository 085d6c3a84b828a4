"""The command's arguments, and what it prints and returns.

The exit status is 0 when there is a plan, whether it fits or not; 1 when the step cannot be
compiled; 2 when the question was wrong, with one line that says why; 130 after Ctrl-C.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence

import jax

from convjax.sharding.targets import Target, target
from convjax.training.errors import ConfigError, RunError, one_line
from pallas_kernels.command_line import OneLineParser

_FIELD = "--config."
_UNITS = {"MB": 2**20, "GB": 2**30}


def main(arguments: Sequence[str] | None = None, *, description: str | None = None) -> int:
    """Answer the question in `arguments`, by default the command line's; the exit status."""
    parser = _parser(description)
    rest, overrides = _split(sys.argv[1:] if arguments is None else arguments, parser)
    options = parser.options(rest)
    if not options.config:
        parser.error("--config must be given")
    jax.config.update("jax_platforms", "cpu")  # the GPUs that are asked about need not be there
    try:
        _answer(options, overrides)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ConfigError as error:
        return _complain(f"error: {one_line(error, width=1000)}", 2)
    except (RunError, OSError) as error:
        return _complain(f"error: {one_line(error, width=1000)}", 1)
    return 0


def _parser(description: str | None) -> OneLineParser:
    parser = OneLineParser("python -m convjax.sharding.plan", description)
    add = parser.add_argument
    add("--config", help="a Python file with get_config()")
    add("--mesh", type=_mesh, help="data=4,tower=2; by default the config's own")
    add("--device", type=_target, default="NVIDIA H200", help='by default "NVIDIA H200"')
    add(
        "--memory", type=_bytes, help="of a device: 3GB, of 2^30 bytes; by default the device's own"
    )
    add("--json", action="store_true", help="for a program; sizes in bytes, times in seconds")
    return parser


def _split(arguments: Sequence[str], parser: OneLineParser) -> tuple[list[str], dict[str, str]]:
    """The config's fields apart from the rest; `--f=v` and `--f v` are the same."""
    others: list[str] = []
    overrides: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith(_FIELD):
            others.append(argument)
            continue
        name, given, value = argument.removeprefix(_FIELD).partition("=")
        overrides[name] = value if given else next(rest, "")
        if not given and not overrides[name]:
            parser.error(f"{argument} needs a value")
    return others, overrides


def _answer(options: argparse.Namespace, overrides: dict[str, str]) -> None:
    # Not before the arguments are known to be right: these imports take a second or two.
    from convjax.sharding.plan.planning import make_plan
    from convjax.sharding.plan.report import print_plan
    from convjax.training.config import load_config

    config = load_config(options.config, overrides)
    plan = make_plan(config, options.mesh, options.device, options.memory)
    if options.json:
        print(json.dumps(plan.as_json(), indent=2))
    else:
        print_plan(plan)


def _mesh(text: str) -> dict[str, int]:
    sizes = {}
    for entry in text.split(","):
        found = re.fullmatch(r"\s*(\w+)=(\d+)\s*", entry)
        if not found or found[1] in sizes:
            raise argparse.ArgumentTypeError(f"mesh={text!r} must be like data=4,tower=2")
        sizes[found[1]] = int(found[2])
    return sizes


def _target(text: str) -> Target:
    try:
        return target(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([MG])i?B", text)
    if not found or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"memory={text!r} must be like 3GB or 512MB, above 0")
    return round(float(found[1]) * _UNITS[f"{found[2]}B"])


def _complain(message: str, status: int) -> int:
    print(message, file=sys.stderr)
    return status
