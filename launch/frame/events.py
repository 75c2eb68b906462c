"""The events of a run as lines of JSON, for the programs that watch it (--log_json)."""

import contextlib
import json
import logging
import os
from collections.abc import Iterator

from jaxdp.files import check_folder, happened
from jaxdp.files.happenings import EVENTS
from jaxdp.privacy.times import utc
from jaxdp.version import __version__

STDERR = "-"


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        assert isinstance(record.args, tuple)
        event, fields = record.args
        assert isinstance(fields, dict)
        line = {"time": utc(record.created), "event": event, "pid": os.getpid()}
        return json.dumps({**line, **fields}, default=str)


@contextlib.contextmanager
def as_lines(path: str, launcher: str) -> Iterator[None]:
    """Appends a line for each event of the body to a file, if the path is not "".

    The first line is a start, the last one an end or an error. A process that is killed writes no
    last line. An error has its kind only, because its message may quote a value of a user's file.

    Args:
      path: The path of the file, or `STDERR`.
      launcher: The name of the running program.

    Raises:
      OSError: The file cannot be written.
      ValueError: Its folder does not exist.
    """
    if not path:
        yield
        return
    if path != STDERR:
        check_folder("--log_json", path)
        if os.path.isdir(path):
            raise IsADirectoryError(f"--log_json must be a file, got the folder {path!r}.")
    handler = logging.StreamHandler() if path == STDERR else logging.FileHandler(path)
    handler.setFormatter(_Lines())
    # The handlers of absl print events too, but only at --verbosity=0 and above.
    EVENTS.propagate = EVENTS.isEnabledFor(logging.INFO)
    EVENTS.setLevel(logging.INFO)
    EVENTS.addHandler(handler)
    try:
        happened("start", lambda: {"launcher": launcher, "version": __version__})
        yield
        happened("end", dict)
    except BaseException as error:
        kind = type(error).__name__
        happened("error", lambda: {"kind": kind})
        raise
    finally:
        EVENTS.removeHandler(handler)
        EVENTS.setLevel(logging.NOTSET)
        EVENTS.propagate = True
        handler.close()
