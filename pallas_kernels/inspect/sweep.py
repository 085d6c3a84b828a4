"""Many queries at once, in several processes; kernels that are the same are compiled once."""

import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple, TypeVar

import jax

from pallas_kernels.inspect import machine_code
from pallas_kernels.inspect.architectures import Architecture
from pallas_kernels.inspect.compiler import CompilerError, compile_kernel
from pallas_kernels.inspect.lowering import Launch
from pallas_kernels.inspect.machine_code import MachineCode
from pallas_kernels.inspect.query import NO_KERNEL, Answer, Query

Item = TypeVar("Item")
Result = TypeVar("Result")

Progress = Callable[[str, int, int, float], None]
"""Takes what is being done, how many are, of how many, and the seconds since the first began."""


class _Kernel(NamedTuple):
    """All that the machine code depends on."""

    ttir: str
    warps: int
    stages: int
    architecture: Architecture


def inspect_all(queries: Sequence[Query], *, jobs: int, progress: Progress) -> list[Answer]:
    """`inspect` of every query, in order, by `jobs` processes.

    A call that the backend refuses, or a kernel that the compiler does, is an answer with a reason.
    """
    pool = None
    if jobs > 1:
        # Not forked: jax has threads.
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin)
    try:
        lowered = _map(pool, _lower, queries, "lowering", progress)
        kernels = list(
            dict.fromkeys(
                _kernel(query, launch)
                for query, launches in zip(queries, lowered, strict=True)
                if not isinstance(launches, str)
                for launch in launches
            )
        )
        compiled = _map(pool, _compile, kernels, "compiling", progress)
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)
    codes = dict(zip(kernels, compiled, strict=True))
    return [
        answer
        for query, launches in zip(queries, lowered, strict=True)
        for answer in _answers(query, launches, codes)
    ]


def _begin() -> None:
    """In each process: it needs no GPU, and the first process stops it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    jax.config.update("jax_platforms", "cpu")


def _map(
    pool: ProcessPoolExecutor | None,
    function: Callable[[Item], Result],
    items: Sequence[Item],
    doing: str,
    progress: Progress,
) -> list[Result]:
    started, results = time.monotonic(), []
    for result in (map if pool is None else pool.map)(function, items):
        results.append(result)
        progress(doing, len(results), len(items), time.monotonic() - started)
    return results


def _lower(query: Query) -> tuple[Launch, ...] | str:
    """The kernels of a query, or why there are none."""
    try:
        return query.trace().launches or NO_KERNEL
    except NotImplementedError as error:
        return str(error)


def _kernel(query: Query, launch: Launch) -> _Kernel:
    return _Kernel(launch.ttir, launch.warps, launch.stages, query.architecture)


def _compile(kernel: _Kernel) -> MachineCode | str:
    """A kernel's machine code, or why there is none."""
    try:
        binary = compile_kernel(**kernel._asdict())
    except CompilerError as error:
        return str(error)
    return machine_code.read(binary, kernel.architecture)


def _answers(
    query: Query,
    launches: tuple[Launch, ...] | str,
    codes: dict[_Kernel, MachineCode | str],
) -> list[Answer]:
    if isinstance(launches, str):
        return [Answer(query, reason=launches)]
    answers = []
    for launch in launches:
        code = codes[_kernel(query, launch)]
        if isinstance(code, str):
            answers.append(Answer(query, launch, reason=code))
        else:
            answers.append(Answer(query, launch, code))
    return answers
