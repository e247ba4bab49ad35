"""A real embedded engine as a child process, and a client that gets in its way."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import requests

from data_contracts.parameters import EngineParameters
from drafter_data.embedded.launch import SINGLE_THREADED, embedded_command, free_port
from drafter_data.engines.process import EngineProcess


@dataclass(frozen=True)
class RunningEngine:
    """An embedded engine, its dump folder and its request log."""

    url: str
    model: Path
    dump_folder: Path
    request_log: Path
    process: EngineProcess

    def parameters(self, **changes: object) -> EngineParameters:
        """Flow parameters that name this engine."""
        settings = {"kind": "embedded", "url": self.url, "model": str(self.model), "dump_folder": str(self.dump_folder)}
        return EngineParameters.model_validate({**settings, **changes})


@contextmanager
def running_engine(model: Path, *flags: str, dump_folder: Path | None = None) -> Generator[RunningEngine]:
    """Starts an embedded engine with a dump folder of its own on the RAM disk, or with a given one, and ends both."""
    ram = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="dd-test-", dir=ram))
    port = free_port()
    log = folder.with_suffix(".requests.jsonl")
    command = embedded_command(model=model, dump_folder=dump_folder or folder, port=port, flags=["--request-log", str(log), *flags])
    url = f"http://127.0.0.1:{port}"
    engine_log = folder.with_suffix(".log")
    try:
        with EngineProcess(
            command, env=SINGLE_THREADED, log=engine_log, ready_url=f"{url}/ready", ready_timeout_seconds=60
        ) as process:
            yield RunningEngine(url, model, dump_folder or folder, log, process)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        log.unlink(missing_ok=True)
        engine_log.unlink(missing_ok=True)


@contextmanager
def health_checks(url: str, per_second: float = 10.0) -> Generator[Sequence[int]]:
    """A client that calls `/health_generate` beside the test; yields the list of status codes that it has seen."""
    stop, seen = threading.Event(), list[int]()

    def call() -> None:
        session = requests.Session()
        while not stop.wait(1 / per_second):
            seen.append(session.get(f"{url}/health_generate", timeout=60).status_code)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()
