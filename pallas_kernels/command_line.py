"""An argument parser whose errors are one line, for this package's commands and `convjax`'s.

Those of `experiments` have one of their own, which answers without jax: to import this package
takes a second or two.
"""

import argparse
import difflib
from collections.abc import Sequence
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Ends with status 2 and one line; of an unknown argument that names the nearest option."""

    def __init__(self, command: str, description: str | None) -> None:
        """Make a parser of `command` without options but --help, which prints the description."""
        super().__init__(
            command,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """End with one line and status 2."""
        self.exit(2, f"error: {message}\n")

    def options(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """What is given, by default in the command line; ends if no option takes all of it."""
        options, extras = self.parse_known_args(arguments)
        if extras:
            known = [option for action in self._actions for option in action.option_strings]
            extra = extras[0].partition("=")[0]
            near = difflib.get_close_matches(extra, known, n=1, cutoff=0)[0]
            hint = f"; the nearest is {near}" if extra.startswith("-") else ""
            self.error(f"unknown argument {extra}{hint}")
        return options
