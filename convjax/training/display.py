"""What a run says while it runs: a live bar on a terminal, now and then a line elsewhere."""

import datetime

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

_LINES_A_RUN = 20


class Display:
    """Shows how far a run is; without a terminal it prints plain lines."""

    def __init__(
        self,
        total_steps: int,
        batch_size: int,
        console: Console | None = None,
        *,
        quiet: bool = False,
    ) -> None:
        """Show a run of so many steps and images a step; on standard output by default."""
        self._console = console or Console(highlight=False, soft_wrap=True, quiet=quiet)
        self._total_steps, self._batch_size = total_steps, batch_size
        self._next_line = 0.0
        self._progress: Progress | None = None
        if self._console.is_terminal and not quiet:
            columns = (BarColumn(), TextColumn("{task.description}"))
            self._progress = Progress(*columns, console=self._console, refresh_per_second=4)
            self._task = self._progress.add_task("", total=total_steps)
            self._progress.start()

    def say(self, text: str) -> None:
        """Print a line, above the bar."""
        self._console.print(text, markup=False)

    def show(self, step: int, loss: float, images_per_second: float) -> None:
        """Show how far the run is, as often as the output bears."""
        seconds_left = (self._total_steps - step) * self._batch_size / images_per_second
        left = datetime.timedelta(seconds=round(seconds_left))
        text = (
            f"step {step}/{self._total_steps}  loss {loss:.4f}  "
            f"{images_per_second:,.0f} images/s  {left} left"
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=text)
        elif step >= self._next_line:
            self.say(text)
            self._next_line = step + self._total_steps / _LINES_A_RUN

    def close(self) -> None:
        """Leave the bar where it is."""
        if self._progress is not None:
            self._progress.stop()
