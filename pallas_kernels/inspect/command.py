"""The command's arguments, and what it prints and returns.

The exit status is 0 when all went well; 1 when the compiler refused a kernel; 2 when the question
was wrong, with one line that says why; 130 after Ctrl-C.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import get_args

import jax

from pallas_kernels.calls import Pass
from pallas_kernels.command_line import OneLineParser
from pallas_kernels.inspect import arguments as of_calls
from pallas_kernels.inspect import compiler, report
from pallas_kernels.inspect.architectures import ARCHITECTURES
from pallas_kernels.inspect.arguments import DTYPES, OPERATIONS, OPTIONS_OF
from pallas_kernels.inspect.query import NO_KERNEL, Query, inspect
from pallas_kernels.inspect.roofline import GPU, GPUS, default_gpu
from pallas_kernels.inspect.sweep import inspect_all
from pallas_kernels.workloads import workloads

_OF_ALL = {"jobs", "precision"}
"""The options of `--all` that one call may not have."""


def main(arguments: Sequence[str] | None = None, *, description: str | None = None) -> int:
    """Answer the question in `arguments`, by default the command line's; the exit status."""
    parser = _parser(description)
    options = parser.options(arguments)
    _check(options, parser)
    jax.config.update("jax_platforms", "cpu")  # the GPU that is asked about need not be there
    try:
        return _answer_one(options) if options.all is None else _answer_all(options)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except compiler.CompilerError as error:
        return _complain(f"error: {error}", 1)
    except (ValueError, TypeError, NotImplementedError) as error:
        return _complain(f"error: {str(error).splitlines()[0]}", 2)
    except BrokenProcessPool:
        return _complain("error: the compiler crashed; with --jobs=1 it says why", 1)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _complain(message: str, status: int) -> int:
    print(message, file=sys.stderr)
    return status


def _parser(description: str | None) -> OneLineParser:
    parser = OneLineParser("python -m pallas_kernels.inspect", description)
    add = parser.add_argument
    add("operation", nargs="?", choices=OPERATIONS, help="one call of an operation")
    add("--all", nargs="?", const="*", metavar="PATTERN", help="all of `workloads(PATTERN)`")
    add("--dtype", help=f"{', '.join(DTYPES)}; several with --all; by default bfloat16")
    add("--precision", choices=("default", "high", "highest"), help="tf32, three of tf32, float32")
    add("--arch", choices=list(ARCHITECTURES), help="by default that of --gpu")
    add("--gpu", type=_gpu, help=f"{', '.join(GPUS)}; by default the first of --arch")
    add("--json", action="store_true", help="an object a kernel; a list for several and for --all")
    add("--pass", choices=get_args(Pass), help="by default forward")
    add("--dump", choices=("jaxpr", "ttir", "ptx", "sass"), help="print that in place of a report")
    of_calls.add_to(parser)
    add = parser.add_argument_group("--all").add_argument
    add("--jobs", type=int, help="processes; by default one a CPU")
    return parser


def _check(options: argparse.Namespace, parser: OneLineParser) -> None:
    """End if the options do not make a question."""
    if (options.all is None) == (options.operation is None):
        parser.error(f"give one of {', '.join(OPERATIONS)} and --all")
    asked = options.operation or "--all"
    had = _OF_ALL if options.all is not None else OPTIONS_OF[asked]
    for name in sorted(set.union(_OF_ALL, *OPTIONS_OF.values()) - had):
        if getattr(options, name.replace("-", "_")) is not None:
            parser.error(f"--{name} is not an option of {asked}")
    for name in of_calls.needed(asked) if options.operation else ():
        if getattr(options, name) is None:
            parser.error(f"{asked} needs --{name}")
    if options.arch is None and options.gpu is None:
        parser.error(f"--arch must be given: {', '.join(ARCHITECTURES)}")
    if options.gpu and options.arch not in (None, options.gpu.architecture):
        parser.error(f"gpu={options.gpu.name} is {options.gpu.architecture}, not {options.arch}")
    if options.blocks and getattr(options, "pass") not in (None, "forward"):
        parser.error("--blocks are the forward kernel's: a gradient takes its own")
    if options.json and options.dump:
        parser.error("--dump prints text: give it or --json")
    dtypes = (options.dtype or "bfloat16").split(",")
    for dtype in dtypes:
        if dtype not in DTYPES:
            parser.error(f"dtype={dtype!r} must be one of {', '.join(DTYPES)}")
    if len(dtypes) > 1 and asked != "--all":
        parser.error(f"dtype={options.dtype!r} must be one dtype, except with --all")
    if options.jobs is not None and options.jobs < 1:
        parser.error(f"jobs={options.jobs} must be at least 1")
    if options.dump not in ("jaxpr", "ttir") and (message := compiler.missing()):
        parser.error(message)
    options.dtypes = dtypes
    options.gpu = options.gpu or default_gpu(str(options.arch))
    if asked == "matmul_fp8" and options.gpu.architecture == "sm_80":
        parser.error("matmul_fp8 needs sm_89 or later: sm_80 has no 8-bit floats")


def _answer_one(options: argparse.Namespace) -> int:
    call, which = of_calls.call_of(options, options.dtypes[0]), getattr(options, "pass")
    if which not in (None, *call.passes):
        passes = ", ".join(call.passes)
        raise ValueError(f"pass={which!r} must be one of {call.operation}'s: {passes}")
    query = Query(
        call,
        options.gpu,
        which or "forward",
        precision=options.precision,
        algorithm=options.algorithm,
        blocks=options.blocks,
    )
    if options.dump:
        print(_dump(query, options.dump))
        return 0
    answers = inspect(query)
    if options.json:
        objects = [report.as_json(answer) for answer in answers]
        print(json.dumps(objects[0] if len(objects) == 1 else objects, indent=2))
    else:
        print("\n\n".join(map(report.as_lines, answers)))
    return 0


def _dump(query: Query, stage: str) -> str:
    trace = query.trace()
    if stage == "jaxpr":
        return trace.jaxpr
    texts = [
        launch.ttir if stage == "ttir" else getattr(query.compile(launch), stage)
        for launch in trace.launches
    ]
    return "\n".join(texts) or f"no {stage}: {NO_KERNEL}"


def _answer_all(options: argparse.Namespace) -> int:
    found = workloads(options.all)
    if not found:
        networks = ", ".join(dict.fromkeys(workload.network for workload in workloads()))
        raise ValueError(f"--all={options.all}: no workload has such a name; networks: {networks}")
    queries = [
        Query(
            replace(workload.call, dtype=dtype),
            options.gpu,
            which,
            precision=options.precision if workload.call.is_product else None,
            workload=workload,
        )
        for workload in found
        for dtype in options.dtypes
        for which in workload.call.passes
    ]
    answers = inspect_all(queries, jobs=options.jobs or os.cpu_count() or 1, progress=_progress)
    if options.json:
        print(json.dumps([report.as_json(answer) for answer in answers], indent=2))
    else:
        print(report.as_table(answers))
    refused = any(answer.launch and not answer.code for answer in answers)
    return 1 if refused else 0


def _progress(doing: str, done: int, total: int, seconds: float) -> None:
    """One line that is written over on a terminal, and ten lines elsewhere."""
    minutes, rest = divmod(round(seconds / done * (total - done)), 60)
    line = f"{doing} {done} of {total}, {minutes} min {rest} s left"
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r{line:<60}", end=end, file=sys.stderr, flush=True)
    elif done == total or done * 10 // total > (done - 1) * 10 // total:
        print(line, file=sys.stderr, flush=True)


def _gpu(text: str) -> GPU:
    name = text.upper().replace(" ", "")
    if name not in GPUS:
        raise argparse.ArgumentTypeError(f"gpu={text!r} must be one of {', '.join(GPUS)}")
    return GPUS[name]
