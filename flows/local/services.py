"""Server, work pool, deployments and worker, started through Prefect's own command line."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import requests
from pydantic import ValidationError

from data_contracts.record import Record
from drafter_data.errors import DrafterDataError, UsageError
from drafter_data.files import write_atomic
from flows.local.processes import StartedProcess, start, stop

CHECKOUT = Path(__file__).resolve().parents[2]
PREFECT = str(Path(sys.executable).with_name("prefect"))
POOL = "local"
COMMAND_SECONDS = 300
READY_SECONDS = 120.0


class StartedServices(Record):
    """What is written down of what runs."""

    port: int
    processes: tuple[StartedProcess, ...] = ()


class ServiceFailed(DrafterDataError):
    """Server, worker or deployments could not be started."""

    reason = "service-failed"


@dataclass(frozen=True)
class Services:
    """A Prefect server and worker whose data, logs and record of processes lie in `folder`."""

    folder: Path
    port: int
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    """Further settings of Prefect for server, worker and commands: a database, a password."""

    @property
    def url(self) -> str:
        """Where the UI is."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def api(self) -> str:
        """What PREFECT_API_URL must be."""
        return f"{self.url}/api"

    def environment(self) -> dict[str, str]:
        """This process's environment without any Prefect settings but those of this server."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        return inherited | {
            "PREFECT_HOME": str(self.folder),
            "PREFECT_API_URL": self.api,
            # Without it the pages of a server on another port than 4200 ask 4200.
            "PREFECT_UI_API_URL": self.api,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "PREFECT_CLI_PROMPT": "false",
            **self.settings,
        }

    def call(self, method: str, route: str, body: object = None, *, timeout_seconds: float = 30.0) -> requests.Response:
        """Asks the API, with the password where there is one. Raises requests.RequestException when it does not answer."""
        user, _, password = self.settings.get("PREFECT_API_AUTH_STRING", "").partition(":")
        auth = (user, password) if user else None
        return requests.request(method, f"{self.api}/{route}", json=body, auth=auth, timeout=timeout_seconds)

    def start(self, say: Callable[[str], None]) -> None:
        """Starts everything. Raises ServiceFailed with the log's tail, or UsageError when the port is taken; then nothing runs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if _answers(self.url):
            raise UsageError(f"port {self.port} is in use; name a free one (PORT=...)", reason="port-in-use")
        try:
            say("starting the Prefect server")
            self._start("server", ["server", "start", "--host", "127.0.0.1", "--port", str(self.port)])
            self._wait("server", lambda: _answers(f"{self.api}/health"))
            say("registering the deployments")
            self.prefect(["work-pool", "create", POOL, "--type", "process", "--overwrite"])
            self.prefect(["deploy", "--all"])
            say("starting the worker")
            self._start("worker", ["worker", "start", "--pool", POOL])
            self._wait("worker", self._worker_is_online)
        except BaseException:
            self.stop()
            raise

    def prefect(self, arguments: Sequence[str]) -> str:
        """Runs a Prefect command in the checkout; returns its output. Raises ServiceFailed with it when the command fails."""
        try:
            done = subprocess.run(
                [PREFECT, *arguments],
                env=self.environment(),
                cwd=CHECKOUT,
                capture_output=True,
                text=True,
                check=False,
                timeout=COMMAND_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise ServiceFailed(
                f"`prefect {' '.join(arguments)}` did not end within {COMMAND_SECONDS} s; the server's log is in {self.folder}"
            ) from error
        if done.returncode:
            raise ServiceFailed(f"`prefect {' '.join(arguments)}` ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def running(self) -> tuple[StartedProcess, ...]:
        """What was started here and still runs."""
        return tuple(process for process in self._recorded().processes if process.alive())

    def healthy(self) -> bool:
        """Whether server and worker both run and the server answers."""
        return {process.name for process in self.running()} >= {"server", "worker"} and _answers(f"{self.as_started().api}/health")

    def as_started(self) -> Services:
        """The same folder with the port that its running server was given."""
        return Services(self.folder, self._recorded().port, self.settings)

    def stop(self) -> list[str]:
        """Ends exactly what was started here, the latest first; returns the names of what was still running."""
        processes = self.running()
        for process in reversed(processes):
            stop(process)
        self._record.unlink(missing_ok=True)
        return [process.name for process in processes]

    @property
    def _record(self) -> Path:
        return self.folder / "processes.json"

    def _recorded(self) -> StartedServices:
        try:
            return StartedServices.model_validate_json(self._record.read_bytes())
        except (FileNotFoundError, ValidationError):
            return StartedServices(port=self.port)

    def _start(self, name: str, arguments: Sequence[str]) -> None:
        log = self.folder / f"{name}.log"
        process = start(name, [PREFECT, *arguments], env=self.environment(), log=log, cwd=CHECKOUT)
        processes = (*self._recorded().processes, process)
        write_atomic(self._record, StartedServices(port=self.port, processes=processes).model_dump_json())

    def _wait(self, name: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not ready():
            alive = any(process.name == name for process in self.running())
            if not alive or time.monotonic() > deadline:
                what = f"was not ready after {READY_SECONDS:.0f} s" if alive else "ended before it was ready"
                log = self.folder / f"{name}.log"
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
                raise ServiceFailed(f"the Prefect {name} {what}; its log {log} ends with:\n{tail}")
            time.sleep(0.2)

    def _worker_is_online(self) -> bool:
        try:
            found = self.call("POST", f"work_pools/{POOL}/workers/filter", {}, timeout_seconds=10.0)
        except requests.RequestException:
            return False  # a busy server; asked again until the time is up
        return found.ok and any(worker["status"] == "ONLINE" for worker in found.json())


def _answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=2).ok
    except requests.RequestException:
        return False
