"""An inference server as a child in a process group of its own: ready or refused with its log's tail, and ended as a whole.

Prefect's cancel ends the flow's process but not what it started, and a killed flow cannot clean up: so the group has a supervisor
(`supervisor.py`) that ends it when the starter is gone.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO
from urllib.parse import urlsplit

import requests

from drafter_data.engines import supervisor
from drafter_data.errors import EngineLost

STOP_SECONDS = 10.0
_TAIL_BYTES = 4096
_TAIL_LINES = 12


class EngineProcess:
    """Starts `argv` on entering and ends its group on leaving.

    `env` is added to this process's environment. Output goes to the end of `log`. Entering returns once `ready_url` answers 200 and
    raises EngineLost, with the log's tail, when the server exits before that or `ready_timeout_seconds` have passed.
    """

    def __init__(
        self, argv: list[str], *, env: Mapping[str, str] | None = None, log: Path, ready_url: str, ready_timeout_seconds: float
    ) -> None:
        self.argv = argv
        self.log = log
        self._env = {**os.environ, **(env or {})}
        self._ready_url = ready_url
        self._ready_timeout_seconds = ready_timeout_seconds
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EngineProcess:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The process group's id (the supervisor's pid). Raises RuntimeError before the start."""
        if self._process is None:
            raise RuntimeError("the engine was not started")
        return self._process.pid

    def start(self) -> None:
        """Starts the server and waits until it is ready. Raises EngineLost; nothing is left running then."""
        if self.alive():
            raise RuntimeError("the engine runs already")
        self._check_port()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self._log_start = output.tell()
            self._process = self._spawn(output)
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise

    def alive(self) -> bool:
        """Whether the server runs. The leader is left unreaped, so that its group id cannot be another's until `stop`."""
        if self._process is None or self._process.returncode is not None:
            return False
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def stop(self, grace_seconds: float = STOP_SECONDS) -> None:
        """Ends the whole group: SIGTERM, then SIGKILL after `grace_seconds`. Does nothing when it was stopped before."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        if self.alive():
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + grace_seconds
            while self.alive() and time.monotonic() < deadline:
                time.sleep(0.02)
        self._signal(signal.SIGKILL)  # also those of the group that outlived the server
        process.wait()
        deadline = time.monotonic() + STOP_SECONDS
        while self._port_answers() and time.monotonic() < deadline:
            time.sleep(0.01)  # killed processes give their port back when the kernel has taken them down

    def tail(self) -> str:
        """The last lines that this server wrote."""
        with self.log.open("rb") as handle:
            end = handle.seek(0, os.SEEK_END)
            handle.seek(max(self._log_start, end - _TAIL_BYTES))
            return "\n".join(handle.read().decode(errors="replace").splitlines()[-_TAIL_LINES:])

    def _spawn(self, output: IO[bytes]) -> subprocess.Popen[bytes]:
        own = [sys.executable, "-I", "-S", str(Path(supervisor.__file__)), str(os.getpid()), str(STOP_SECONDS), "--"]
        return subprocess.Popen(
            [*own, *self.argv],
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _check_port(self) -> None:
        """Another server on the port would answer in this one's name until this one has found that it cannot have it."""
        if self._port_answers():
            raise EngineLost(
                f"port {urlsplit(self._ready_url).port} is taken by another server; stop that one, name another port, or give its "
                "URL instead",
                reason="port-taken",
            )

    def _port_answers(self) -> bool:
        address = urlsplit(self._ready_url)
        with suppress(OSError), socket.create_connection((address.hostname or "127.0.0.1", address.port or 80), timeout=2):
            return True
        return False

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + self._ready_timeout_seconds
        pause = 0.05
        while True:
            if not self.alive():
                raise EngineLost(self._message("ended before it was ready"), reason="engine-exited")
            with suppress(requests.RequestException):
                if requests.get(self._ready_url, timeout=2).status_code == requests.codes.ok:
                    return
            if time.monotonic() > deadline:
                raise EngineLost(
                    self._message(f"was not ready at {self._ready_url} after {self._ready_timeout_seconds:g} s"),
                    reason="engine-not-ready",
                )
            time.sleep(pause)
            pause = min(1.0, pause * 1.3)

    def _message(self, what: str) -> str:
        command = " ".join([Path(self.argv[0]).name, *self.argv[1:4]])
        return f"the engine ({command}) {what}; its log {self.log} ends with:\n{self.tail()}"

    def _signal(self, number: int) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
