"""Which way is the fastest, for every operation in a function: the idea of cuDNN's benchmark mode.

    report = tune(training_step, state, batch)     finds the operations and tunes each once
    with autotune(): step(state, batch)            tunes what is not known yet, as it is traced

A choice is for the whole arrays on one device; on a mesh, operations ask about theirs before they
are split. What is kept is faster than the default by more than noise, or the default. On a GPU a
kernel is not timed if the compiler has something against it (`screening`): this is asked, within
the budget, of a candidate when its turn comes.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from pallas_kernels import launch, selection
from pallas_kernels.calls import Call, Pass
from pallas_kernels.inspect.architectures import Architecture
from pallas_kernels.selection import Choice, Question
from pallas_kernels.tuning import screening
from pallas_kernels.tuning.candidates import candidates
from pallas_kernels.tuning.floors import floor_seconds
from pallas_kernels.tuning.report import Report, Row
from pallas_kernels.tuning.screening import Objection
from pallas_kernels.tuning.timing import TOLERANCE, Bench, Contender, race

NOISE = 0.03
"""The part of its time by which a choice must beat the default."""

Progress = Callable[[int, int, float], None]
"""Takes how many questions are answered, of how many, and an estimate of the seconds left."""


def tune(
    function: Callable[..., Any],
    *arguments: Any,
    budget: float = 600.0,
    again: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Finds every operation that `function` does with backend="auto" and tunes each shape once.

    A training step is tuned forward and backward. Choices are kept in the user's table for this
    kind of device. All that jax has compiled is dropped, so that what runs next has them. On a GPU,
    an operation for which a kernel wins has a kernel's derivatives from then on: reverse mode only.
    Processes that run one program together need the same table: tune in one of them, first.

    Args:
      function: of arrays, as `jax.jit` takes it; it is traced and not run.
      *arguments: of `function`, or their shapes as `jax.ShapeDtypeStruct`.
      budget: seconds for all of it; what they do not suffice for keeps its default.
      again: whether to tune also what the table has.
      progress: is told how far it is, after every pass of a shape.
    """
    questions: dict[Question, int] = {}

    def note(call: Call, which: Pass) -> None:
        question = selection.asked(call, which)
        questions[question] = questions.get(question, 0) + 1

    jax.clear_caches()  # a function that jax knows already would not be traced
    with selection.listening(note):
        jax.eval_shape(function, *arguments)
    report = tune_all(questions, budget=budget, again=again, progress=progress)
    jax.clear_caches()
    return report


def tune_all(
    questions: dict[Question, int],
    *,
    budget: float,
    again: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Tunes every question, which is asked so many times, the ones with the most work first.

    Args:
      questions: passes of calls, and how often a function asks each.
      budget: seconds.
      again: whether to tune also what the table has.
      progress: is told how far it is.
    """
    started = time.monotonic()
    device_kind, platform = launch.device_kind(), launch.platform()
    architecture, unscreened = _architecture(device_kind) if platform == "gpu" else (None, None)
    rows: list[Row] = []
    order = sorted(questions, key=lambda question: -question[0].work(question[1]).flops)
    for index, (call, which) in enumerate(order):
        known = None if again else selection.known(call, which)
        if known is not None:
            rows.append(Row.known(call, which, questions[call, which], known))
        else:
            left = budget - (time.monotonic() - started)
            share = max(left, 0.0) / (len(order) - index) * 2
            seconds = min(share, max(left, 0.0))
            row = _answer(call, which, platform, seconds=seconds, architecture=architecture)
            rows.append(row.times(questions[call, which]))
            if row.seconds is not None:
                selection.remember(device_kind, {selection.key(call, which): row.entry})
        if progress is not None:
            spent = time.monotonic() - started
            left = spent / (index + 1) * (len(order) - index - 1)
            progress(index + 1, len(order), min(left, max(budget - spent, 0.0)))
    return Report(device_kind, tuple(rows), time.monotonic() - started, unscreened)


def _architecture(device_kind: str) -> tuple[Architecture | None, str | None]:
    """What kernels are compiled for before they are timed, or why they are not."""
    try:
        return screening.architecture_of(device_kind), None
    except screening.UnknownError as error:
        return None, str(error)


@contextlib.contextmanager
def autotune(*, budget: float = 30.0) -> Iterator[None]:
    """In this context an operation is tuned when it is first traced, like cuDNN's benchmark flag.

    What is traced for a GPU that is not there is not tuned.

    Args:
      budget: seconds for each pass of each shape.

    Raises:
      RuntimeError: there are several processes, which would not choose alike.
    """
    if jax.process_count() > 1:
        raise RuntimeError(
            f"autotune() in {jax.process_count()} processes would give them different programs: "
            "tune in one, first"
        )
    answered: set[Question] = set()

    def answer(call: Call, which: Pass) -> None:
        question = selection.asked(call, which)
        there = jax.sharding.get_abstract_mesh().abstract_device is None
        if there and question not in answered and selection.known(call, which) is None:
            answered.add(question)
            device = jax.config.values["jax_default_device"]
            _elsewhere(lambda: _tune_on(device, question, budget))

    with selection.listening(answer):
        yield


def _tune_on(device: Any, question: Question, budget: float) -> None:
    with jax.default_device(device):
        tune_all({question: 1}, budget=budget)


def _elsewhere(run: Callable[[], Any]) -> None:
    """Runs it in another thread, which knows nothing of the trace that asks; raises its error."""
    errors: list[BaseException] = []

    def target() -> None:
        try:
            run()
        except BaseException as error:  # re-raised below
            errors.append(error)

    thread = threading.Thread(target=target, name="autotune")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _answer(
    call: Call,
    which: Pass,
    platform: str,
    *,
    seconds: float,
    architecture: Architecture | None = None,
) -> Row:
    """Times the ways to do a pass, as many as `seconds` suffice for."""
    started = time.monotonic()
    ways = candidates(call, which, platform)
    row = Row(call, which, default=ways[0], ways=len(ways))
    if len(ways) == 1 or seconds <= 0 or call.dtype not in TOLERANCE:
        return row
    contenders, refused, dropped = _build(
        call, which, ways, until=started + 0.7 * seconds, architecture=architecture
    )
    row = row.without(refused, dropped)
    if not contenders:
        return row
    race(contenders, seconds=max(0.3 * seconds, 0.1))
    best = min(contenders, key=lambda each: each.median)
    first = contenders[0] if contenders[0].choice == ways[0] else None
    if first is not None and best.median > (1 - NOISE) * first.median:
        best = first
    xla = [each.median for each in contenders if each.choice.backend == "xla"]
    return row.won(
        best.choice,
        seconds=best.median,
        default_seconds=None if first is None else first.median,
        xla_seconds=min(xla) if xla else None,
        floor=floor_seconds(call, which, launch.device_kind()),
        measured=tuple((each.choice, each.median) for each in contenders),
    )


def _build(
    call: Call,
    which: Pass,
    ways: Sequence[Choice],
    *,
    until: float,
    architecture: Architecture | None,
) -> tuple[list[Contender], list[str], list[tuple[Choice, Objection]]]:
    """What could be compiled and was right, what was not, and what there was an objection to;
    always the first, then as time is."""
    bench: Bench | None = None
    contenders: list[Contender] = []
    refused: list[str] = []
    dropped: list[tuple[Choice, Objection]] = []
    for index, choice in enumerate(ways):
        if index and time.monotonic() > until:
            break
        try:
            # The first is what is done anyway: the others' time is compared with its own.
            if index and choice.backend == "triton" and architecture is not None:
                found = screening.objection(call, which, choice, architecture)
                if found is not None:
                    dropped.append((choice, found))
                    continue
            bench = bench or Bench(call, which)
            contenders.append(Contender(call, which, choice, bench))
        except Exception as error:  # of a compiler, an allocator, or a wrong result: the next way
            reason = str(error) or type(error).__name__
            refused.append(f"{choice}: {reason.splitlines()[0]}")
    return contenders, refused, dropped
