"""How the commands take their arguments and end: one line for an error, and an exit status.

0 when all went well; 1 when a run cannot go on; 2 when it was asked for in the wrong words; 128
plus the signal's number when it was stopped.
"""

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that names the nearest option in place of printing all of them."""

    def __init__(self, description: str) -> None:
        """Make a parser without options but --help."""
        super().__init__(
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """End with one line and status 2."""
        self.exit(2, f"error: {message}\n")

    def refuse(self, extras: Sequence[str]) -> None:
        """End if there are arguments that no option took."""
        if extras:
            known = [option for action in self._actions for option in action.option_strings]
            extra = extras[0].partition("=")[0]
            near = max(known, key=lambda option: _likeness(extra, option))
            self.error(f"unknown argument {extra}; the nearest is {near}")

    def require(self, options: argparse.Namespace, *names: str) -> None:
        """End if an option was not given; after `refuse`, which knows better what a typo meant."""
        for name in names:
            if not getattr(options, name):
                self.error(f"--{name} must be given")


def end_with(command: Callable[[], None]) -> int:
    """Run `command` and return the exit status of what it comes to."""
    try:
        return _status_of(command)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)


def _status_of(command: Callable[[], None]) -> int:
    # Not before the arguments are known to be right: these imports take a second or two.
    from convjax.training.errors import ConfigError, RunError, StoppedError, one_line

    try:
        command()
    except ConfigError as error:
        return _complain(one_line(error, width=1000), 2)
    except StoppedError as error:
        return _complain(str(error), 128 + error.signal_number)
    except RunError as error:
        return _complain(one_line(error, width=1000), 1)
    except OSError as error:  # a file that is there and cannot be read, for one
        return _complain(one_line(error), 1)
    return 0


def _complain(message: str, status: int) -> int:
    print(message if status > 128 else f"error: {message}", file=sys.stderr)
    return status


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
