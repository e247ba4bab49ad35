"""A training job as a child in a process group of its own, its output in a log file that is read as it grows.

The job writes to the file, not to a pipe: its last lines survive whoever reads them. The group ends with its starter, also when
that is killed (drafter_data/engines/supervisor.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from drafter_data.engines import supervisor

STOP_SECONDS = 10.0
_TAIL_BYTES = 16_384
_TAIL_LINES = 30
_READ_BYTES = 1 << 20


class JobProcess:
    """Starts `argv` with its output at the end of `log`; `end` ends the whole group."""

    def __init__(self, argv: list[str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("ab") as output:
            self._log_start = self._position = output.tell()
            own = [sys.executable, "-I", "-S", str(Path(supervisor.__file__)), str(os.getpid()), str(STOP_SECONDS), "--"]
            self._process = subprocess.Popen(
                [*own, *argv],
                # Rich folds lines at 80 columns when it writes to a file: a metrics line would come in pieces.
                env={**os.environ, "COLUMNS": "1000", "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._partial = b""

    @property
    def pid(self) -> int:
        """The process group's id."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether the job runs. Its leader is left unreaped, so that the group's id cannot be another's until `end`."""
        if self._process.returncode is not None:
            return False
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def new_lines(self, *, last: bool = False) -> list[str]:
        """What the job has written since the last call, in whole lines (see shown_line).

        `last` says that no more will come: the rest of the file is read, and an unfinished line counts.
        """
        with self._log.open("rb") as handle:
            handle.seek(self._position)
            block = handle.read(-1 if last else _READ_BYTES)
        self._position += len(block)
        *whole, self._partial = (self._partial + block).split(b"\n")
        if last and self._partial:
            whole.append(self._partial)
            self._partial = b""
        return [shown_line(line) for line in whole]

    def end(self, grace_seconds: float = STOP_SECONDS) -> int:
        """Ends what is left of the group, SIGTERM first, and returns the job's exit status, negative for a signal."""
        if self._process.returncode is None:
            if self.alive():
                self._signal(signal.SIGTERM)
                deadline = time.monotonic() + grace_seconds
                while self.alive() and time.monotonic() < deadline:
                    time.sleep(0.02)
            self._signal(signal.SIGKILL)  # also those of the group that outlived the job
        status = self._process.wait()
        return 128 - status if status > 128 else status

    def tail(self) -> str:
        """The last lines of this job's output."""
        with self._log.open("rb") as handle:
            end = handle.seek(0, os.SEEK_END)
            handle.seek(max(self._log_start, end - _TAIL_BYTES))
            return "\n".join(handle.read().decode(errors="replace").splitlines()[-_TAIL_LINES:])

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def shown_line(line: bytes) -> str:
    """What a terminal would show of a line in the end: of one that was drawn over, its last state."""
    return line.rstrip().rpartition(b"\r")[2].decode(errors="replace")
