"""The records of a run: metrics.jsonl, one JSON object a line, and the same for TensorBoard."""

import json
import time
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2
from tensorboardX.summary import scalar

from convjax.training.errors import RunError
from convjax.training.workdir import write_text, writing

Record = dict[str, Any]

# protobuf makes these at import, so that a type checker does not see them.
_Event: Any = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue]
_SessionLog: Any = event_pb2.SessionLog  # pyright: ignore[reportAttributeAccessIssue]


class MetricsWriter:
    """Appends records; each is on its way to disk when `write` returns.

    tensorboardX's own writer is by-passed for its event file: its thread dies of a full disk
    without a word, and the run would then hang on the thread's queue.
    """

    def __init__(self, path: Path, tensorboard: Path, after_step: int) -> None:
        """Continue the files, without what a run that is continued wrote after `after_step`.

        Args:
          path: of metrics.jsonl; made where there is none.
          tensorboard: folder of the event files.
          after_step: the step that the run continues from, 0 for a new one.

        Raises:
          RunError: a file cannot be written.
        """
        kept = [record for record in read_metrics(path) if record["step"] <= after_step]
        write_text(path, "".join(map(_line, kept)))
        with writing(tensorboard):
            tensorboard.mkdir(exist_ok=True)
            # Its name has the second, which may not be enough to tell it from the last one's.
            self._events = EventsWriter(str(tensorboard / "events"), f".{time.time_ns()}")
            start = _SessionLog(status=_SessionLog.START)  # hides what is at or after its step
            self._write_event(after_step + 1, session_log=start)
        self._path = path
        with writing(path):
            self._file = path.open("a")

    def write(self, record: Record) -> None:
        """Append a record, which has a `step`.

        Raises:
          RunError: it cannot be written.
        """
        with writing(self._path):
            self._file.write(_line(record))
            self._file.flush()
            for name, value in record.items():
                if name != "step":
                    self._write_event(record["step"], summary=scalar(name, value))
            self._events.flush()

    def close(self) -> None:
        """Close the files; raises as `write`."""
        with writing(self._path):
            self._file.close()
            self._events.close()

    def _write_event(self, step: int, **content: Any) -> None:
        self._events.write_event(_Event(wall_time=time.time(), step=step, **content))


def read_metrics(path: Path) -> list[Record]:
    """Return the records in metrics.jsonl, none if there is no file, without a torn last line.

    Raises:
      RunError: a whole line is no record.
    """
    if not path.exists():
        return []
    whole_lines = path.read_bytes().split(b"\n")[:-1]
    try:
        return [json.loads(line) for line in whole_lines]
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}") from error


def _line(record: Record) -> str:
    return json.dumps(record) + "\n"
