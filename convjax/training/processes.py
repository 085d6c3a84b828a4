"""Several processes that train as one: how they meet, agree, and end together.

Each has its own devices and its own rows of a batch, and makes the same steps. The first one alone
writes what people read. What one process finds out by itself, such as a file that is not there,
is a question to the others before it may change what all of them do.
"""

import contextlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from convjax.training.errors import ConfigError, DamagedError, RunError, one_line
from convjax.training.lost_process import tell_in_one_line
from convjax.training.parsing import differing

HEARTBEAT_SECONDS = 20
"""A process that is silent for so long is lost; the others notice a few seconds later."""

_OF_OTHERS = re.compile(r"gloo|nccl|barrier failed|heartbeat|coordination.?service", re.IGNORECASE)
"""What an error speaks of that comes of another process's end."""


def are_several(environ: Mapping[str, str]) -> bool:
    """Return whether the environment says that there are several processes, in a way jax knows.

    SLURM (srun), Open MPI 4 (mpirun), and Kubernetes' indexed jobs with jax's extra `k8s`.
    """
    if int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return True
    if "OMPI_MCA_orte_hnp_uri" in environ:
        return int(environ.get("OMPI_COMM_WORLD_SIZE", 1)) > 1
    in_indexed_job = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environ.keys()
    return in_indexed_job and find_spec("kubernetes") is not None


@contextlib.contextmanager
def joined(
    coordinator: str | None = None, processes: int | None = None, process_id: int | None = None
) -> Iterator[None]:
    """Be one of a run's processes while this lasts; comes before anything asks jax for devices.

    Without arguments, as the environment says; where it says nothing, there is only this process.

    Args:
      coordinator: HOST:PORT of the first process, which listens there.
      processes: how many there are.
      process_id: which of them this is, from 0.

    Raises:
      ConfigError: the arguments do not fit together, or jax does not find out what they leave open.
      RunError: the processes did not meet, or another one was lost.
    """
    given = coordinator, processes, process_id
    if given == (None, None, None) and not are_several(os.environ):
        yield
        return
    end_telling = tell_in_one_line()
    _initialise(*given)
    try:
        yield
    except Exception as error:
        expected = isinstance(error, ConfigError | RunError)
        if expected and error.agreed:
            jax.distributed.shutdown()
            end_telling()
        elif _OF_OTHERS.search(str(error)):
            time.sleep(2.0)  # jax may be about to end this process, and knows who is lost
            who = f"process {1 - jax.process_index()}"
            if jax.process_count() > 2:
                who = f"another process ({one_line(error)})"
            raise RunError(
                f"{who} is lost; the same command continues from the last checkpoint"
            ) from error
        elif not expected:
            traceback.print_exc()
            leave(1)
        raise
    jax.distributed.shutdown()
    end_telling()


def _initialise(coordinator: str | None, processes: int | None, process_id: int | None) -> None:
    try:
        jax.distributed.initialize(
            coordinator, processes, process_id, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
        )
    except ValueError as error:
        raise ConfigError(
            f"{one_line(error)} Give --coordinator, --processes and --process_id"
        ) from error
    except RuntimeError as error:
        raise RunError(f"the processes do not meet: {one_line(error)}") from error


def is_first() -> bool:
    """Return whether this is the process that writes what people read."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


@contextlib.contextmanager
def agreed() -> Iterator[None]:
    """Let all processes go on or none: an error in one of them is raised in all.

    Raises:
      ConfigError: one was raised inside, here or in another process; the first process's is taken.
      RunError: as ConfigError; an OSError counts as one where there are several processes.
    """
    if not jax.distributed.is_initialized():
        yield
        return
    own = None
    try:
        yield
    except (ConfigError, RunError, OSError) as error:
        own = error
    said = exchange(f"{type(own).__name__} {one_line(own, width=1000)}" if own else "")
    if any(said):
        where, first = next((index, text) for index, text in enumerate(said) if text)
        kind, _, words = first.partition(" ")
        prefix = "" if all(text == first for text in said) else f"process {where}: "
        kinds = {each.__name__: each for each in (ConfigError, DamagedError)}
        error = kinds.get(kind, RunError)(prefix + words)
        error.agreed = True
        raise error from own


def exchange(text: str) -> list[str]:
    """Return what each process says; all of them call this together."""
    own = np.frombuffer(text.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.array([own.size], np.int32)).ravel()
    # Few sizes, as jax compiles for each.
    padded = np.zeros(-(-int(lengths.max()) // 1024) * 1024, np.uint8)
    padded[: own.size] = own
    texts = multihost_utils.process_allgather(padded).reshape(len(lengths), -1)
    return [row[:length].tobytes().decode() for row, length in zip(texts, lengths, strict=True)]


def check_same(values: dict[str, Any]) -> None:
    """Raise a ConfigError if this process has other values than the first one; all call this."""
    if names := differing(values, json.loads(exchange(json.dumps(values))[0])):
        raise ConfigError(f"other values of {', '.join(names)} than in process 0")


def leave(status: int) -> int:
    """Return the status to exit with; does not return if other processes still count on this one.

    At the usual end jax would wait for them, and they may be waiting for this one.
    """
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
