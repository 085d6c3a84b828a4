"""What ends a run early, said in one line each; the commands print it and set the exit status."""

import contextlib
from collections.abc import Iterator


class ConfigError(ValueError):
    """Names or values that a config cannot have.

    Attributes:
      agreed: every process of the run raises it.
    """

    agreed = False


class RunError(RuntimeError):
    """A run that cannot go on; what it saved is kept.

    Attributes:
      agreed: every process of the run raises it.
    """

    agreed = False


class DamagedError(RunError):
    """A checkpoint that is there and cannot be what was saved."""


class StoppedError(RunError):
    """A signal asked the run to stop, and it did so at a step's end, saved.

    Attributes:
      signal_number: SIGTERM or SIGINT.
    """

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


@contextlib.contextmanager
def reading_images(of: str) -> Iterator[None]:
    """Turn an image that is gone, or is none, into a RunError that says where it was wanted."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise RunError(f"images of {of}: {one_line(error)}") from error


def one_line(error: BaseException, *, width: int = 200) -> str:
    """Return what an error says, on one line; of a longer one than `width`, its start and end."""
    text = " ".join(str(error).split()) or type(error).__name__
    half = width // 2 - 1
    return text if len(text) <= width else f"{text[:half]} … {text[-half:]}"
