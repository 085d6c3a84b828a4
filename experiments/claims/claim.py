"""What each claim's script has in common: its row, its folder, its command.

A script says in its docstring what is claimed and where, how it is measured, and what the
measurement can and cannot show. Below that it has

    CLAIM = Claim(name="C9", script="c09_towers", title=..., expected=..., measure=measure)

    if __name__ == "__main__":
        sys.exit(main(CLAIM, __doc__))

where `measure` takes a `Task` and returns a `Measurement`. In the folder `--out` the script writes
its row to c09_towers.json, its pictures to c09_towers/ and what is measured so far to
c09_towers/parts/, from where the same command continues.
"""

import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from convjax.training.errors import StoppedError
from convjax.training.interruption import StopRequest, stop_requests
from convjax.training.workdir import write_json, writing
from experiments.command import OneLineParser, end_with

Preset = Literal["cpu", "gpu", "smoke"]
Holds = Literal["yes", "no", "needs GPU", "needs ImageNet"]
Arrays = Mapping[str, np.ndarray]

_SMOKE_SEEDS = 2


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a script found.

    Attributes:
      measured: the numbers, in a sentence or two.
      holds: whether the claim came out as told, or what it would take to see.
      figures: names of the pictures in the task's folder.
    """

    measured: str
    holds: Holds
    figures: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A claim's row.

    Attributes:
      claim: its name, such as C9.
      title: the claim in a few words.
      expected: what the story says.
      measured: what came out.
      holds: see `Measurement`.
      seconds: of work, over all the pieces of a run that was continued.
      figures: paths of the pictures, below the folder of the row.
    """

    claim: str
    title: str
    expected: str
    measured: str
    holds: Holds
    seconds: float
    figures: tuple[str, ...]

    def write(self, path: Path) -> None:
        """Write the row as JSON, whole or not at all; raises RunError if it cannot be written."""
        write_json(path, dataclasses.asdict(self))

    @classmethod
    def read(cls, path: Path) -> "Outcome | None":
        """Return the row written at `path`, or None if there is none that can be read."""
        try:
            values = json.loads(path.read_text())
            return cls(**{**values, "figures": tuple(values["figures"])})
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """A piece of a measurement, once it is finished.

    Attributes:
      values: what JSON can hold.
      arrays: what it cannot.
      seconds: that it took.
    """

    values: Mapping[str, Any]
    arrays: Arrays
    seconds: float


@dataclass(kw_only=True, eq=False)
class Task:
    """One run of a script.

    Attributes:
      folder: for pictures, and in `parts/` for what is measured so far.
      preset: how much work is done.
      seeds: how often what is drawn is drawn, from seed 0 on.
      options: values of the claim's own options.
      stop: what SIGTERM or Ctrl-C asked for.
    """

    folder: Path
    preset: Preset
    seeds: int
    options: Mapping[str, str] = field(default_factory=dict)
    stop: StopRequest = field(default_factory=StopRequest)

    def __post_init__(self) -> None:
        self._started, self._earlier = time.perf_counter(), 0.0

    def part(
        self,
        name: str,
        settings: Mapping[str, Any],
        measure: Callable[[], tuple[Mapping[str, Any], Arrays]],
    ) -> Part:
        """Measure a part, or return it as it was measured with the same settings before.

        Args:
          name: of its files.
          settings: all that its result depends on, as JSON can hold it.
          measure: returns the values and arrays.

        Raises:
          RunError: it cannot be written.
        """
        if finished := self.finished(name, settings):
            self._earlier += finished.seconds
            return finished
        started = time.perf_counter()
        values, arrays = measure()
        seconds = time.perf_counter() - started
        path = self._part(name)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial.npz")
            np.savez(partial, allow_pickle=False, **dict(arrays))
            path.unlink(missing_ok=True)  # its arrays are about to be another part's
            os.replace(partial, path.with_suffix(".npz"))
        content = {"settings": _as_json(settings), "values": values, "seconds": seconds}
        write_json(path, content)  # last: the sign of a finished part
        return Part(values=values, arrays=arrays, seconds=seconds)

    def finished(self, name: str, settings: Mapping[str, Any]) -> Part | None:
        """Return a part that is there already, of the same settings; None if it is not."""
        path = self._part(name)
        try:
            content = json.loads(path.read_text())
            if content["settings"] != _as_json(settings):
                return None
            with np.load(path.with_suffix(".npz"), allow_pickle=False) as arrays:
                return Part(
                    values=content["values"], arrays=dict(arrays), seconds=content["seconds"]
                )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def check_stop(self) -> None:
        """Raise a StoppedError if a signal asked for an end; finished parts are kept."""
        if (number := self.stop.signal_number) is not None:
            name = signal.Signals(number).name
            kept = "finished parts are kept, and the same command continues"
            raise StoppedError(f"stopped by {name}; {kept} in {self.folder}", number)

    def seconds(self) -> float:
        """Return how long the task took, with the parts that were there already."""
        return time.perf_counter() - self._started + self._earlier

    def _part(self, name: str) -> Path:
        return self.folder / "parts" / self.preset / f"{name}.json"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim and its measurement.

    Attributes:
      name: its row in the table of claims, such as C9.
      script: the file that measures it, without its ending.
      title: the claim in a few words.
      expected: what the story says comes out.
      measure: measures it.
      seeds: how often, unless the command says otherwise.
      options: further options of the command, and their values where they are not given.
    """

    name: str
    script: str
    title: str
    expected: str
    measure: Callable[[Task], Measurement]
    seeds: int = 1
    options: Mapping[str, str] = field(default_factory=dict)

    def run(
        self,
        out: Path,
        preset: Preset = "cpu",
        *,
        seeds: int | None = None,
        options: Mapping[str, str] | None = None,
    ) -> Outcome:
        """Measure the claim in the folder `out`, and write its row there.

        Args:
          out: of rows; made where there is none.
          preset: how much work is done.
          seeds: in place of the claim's own number; a smoke run has two at most.
          options: in place of the claim's own values.

        Raises:
          RunError: it cannot go on; what is measured is kept.
          StoppedError: SIGTERM or Ctrl-C came.
        """
        if seeds is None:
            seeds = min(self.seeds, _SMOKE_SEEDS) if preset == "smoke" else self.seeds
        folder = out / self.script
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with stop_requests() as stop:
            task = Task(
                folder=folder,
                preset=preset,
                seeds=seeds,
                options={**self.options, **(options or {})},
                stop=stop,
            )
            found = self.measure(task)
        outcome = Outcome(
            claim=self.name,
            title=self.title,
            expected=self.expected,
            measured=found.measured,
            holds=found.holds,
            seconds=task.seconds(),
            figures=tuple(f"{self.script}/{figure}" for figure in found.figures),
        )
        outcome.write(out / f"{self.script}.json")
        return outcome


def main(claim: Claim, doc: str | None, arguments: Sequence[str] | None = None) -> int:
    """Run a script's command, and return its exit status.

    Args:
      claim: the script's.
      doc: its docstring, for --help.
      arguments: None takes the command line's.
    """
    parser = OneLineParser(doc or claim.title)
    parser.add_argument("--out", help="the folder of rows and pictures, made if need be")
    parser.add_argument("--preset", choices=get_args(Preset), default="cpu")
    parser.add_argument("--seeds", type=int, help=f"how often, {claim.seeds} if not given")
    for option, value in claim.options.items():
        parser.add_argument(f"--{option}", default=value, help=f"{value} if not given")
    options, extras = parser.parse_known_args(arguments)
    parser.refuse(extras)
    parser.require(options, "out")
    if options.seeds is not None and options.seeds < 1:
        parser.error(f"--seeds={options.seeds} must be at least 1")

    def run() -> None:
        outcome = claim.run(
            Path(options.out),
            options.preset,
            seeds=options.seeds,
            options={name: getattr(options, name) for name in claim.options},
        )
        print(f"{claim.name}, {claim.title}: {outcome.holds}. {outcome.measured}")
        print(f"in {outcome.seconds:.0f} s; {', '.join(outcome.figures)} in {options.out}")

    return end_with(run)


def _as_json(values: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(values))
