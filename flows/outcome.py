"""How a flow ends: a failure of ours is one clear line as the run's state message, without a traceback in the log."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from typing import Any, ParamSpec

from prefect.client.schemas.objects import State
from prefect.exceptions import FailedRun
from prefect.logging import get_run_logger
from prefect.states import Failed

from drafter_data.errors import DrafterDataError

Arguments = ParamSpec("Arguments")

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}
_LOGGERS = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine")


def in_one_line(
    stages: Callable[Arguments, State[Any] | None], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> State[Any] | None:
    """Runs the stages of a flow; returns their state, or a Failed one whose message is the failure's reason and first line."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_without_traceback)
    try:
        return stages(*args, **kwargs)
    except DrafterDataError as error:
        get_run_logger().error("%s: %s", error.reason, error)
        return Failed(message=f"{error.reason}: {_one_line(str(error))}")
    except OSError as error:
        if not _is_of_the_disk(error):
            raise
        message = f"disk: {error.strerror}: {error.filename}; free space or mend the disk, then retry this run, which goes on there"
        get_run_logger().error(message)
        return Failed(message=message)


def _one_line(message: str) -> str:
    """The message, where a log's tail follows it with the tail's last line: the whole of it is in the log of the run."""
    first, *tail = message.splitlines()
    return f"{first} {tail[-1].strip()}" if tail else first


def _is_of_the_disk(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in _DISK_ERRORS


def _without_traceback(record: logging.LogRecord) -> bool:
    """Keeps the line and drops the traceback of failures that say themselves what to do. Anything else is a defect and keeps it."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, (DrafterDataError, FailedRun)) or _is_of_the_disk(error):
        record.exc_info, record.exc_text = None, None
    return True
