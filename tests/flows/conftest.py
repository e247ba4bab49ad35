"""One Prefect server and worker for all flow tests, and an engine behind a door that the tests can shut."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests

from data_contracts.identity import state_key
from drafter_data.embedded.checkpoint import ensure_checkpoint
from drafter_data.embedded.launch import SINGLE_THREADED, embedded_command, free_port
from drafter_data.engines.process import EngineProcess
from flows.local.services import Services


@pytest.fixture(scope="session")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """A real server, worker and the deployments of prefect.yaml."""
    started = Services(tmp_path_factory.mktemp("prefect"), free_port())
    started.start(print)
    yield started
    started.stop()


def call(services: Services, method: str, route: str, body: Any = None) -> Any:
    """One call of the server's API, again while the server says that its database is busy (503); returns the JSON of its reply."""
    deadline = time.monotonic() + 60
    while True:
        reply = requests.request(method, f"{services.api}/{route}", json=body, timeout=60)
        if reply.status_code != 503 or time.monotonic() > deadline:
            reply.raise_for_status()
            return reply.json() if reply.content else None
        time.sleep(0.5)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded engine's checkpoint."""
    return ensure_checkpoint(tmp_path_factory.mktemp("model") / "model")


class Door:
    """A proxy before an engine: records each prompt by its state key, refuses some (400), and can hold all back."""

    def __init__(self, engine_url: str) -> None:
        self.asked: list[str] = []
        self.refuses: Callable[[str], bool] = lambda key: False
        self.open = threading.Event()
        self.open.set()
        self._lock = threading.Lock()
        door = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._pass(requests.get(engine_url + self.path, timeout=60))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.path == "/generate" and door.refused(state_key(json.loads(body)["input_ids"])):
                    self._answer(400, b'{"error": {"message": "refused by the test"}}')
                    return
                self._pass(
                    requests.post(engine_url + self.path, data=body, headers={"Content-Type": "application/json"}, timeout=60)
                )

            def _pass(self, reply: requests.Response) -> None:
                self._answer(reply.status_code, reply.content)

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
                """Silent."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def refused(self, key: str) -> bool:
        """Called for each prompt, from many threads."""
        with self._lock:
            self.asked.append(key)
        self.open.wait(60)
        return self.refuses(key)

    def close(self) -> None:
        self.open.set()
        self._server.shutdown()


@pytest.fixture
def door(model: Path, tmp_path: Path) -> Iterator[Door]:
    """An embedded engine of this test, behind a door."""
    dumps, port = tmp_path / "dumps", free_port()
    dumps.mkdir(mode=0o700)
    with EngineProcess(
        embedded_command(model=model, dump_folder=dumps, port=port),
        env=SINGLE_THREADED,
        log=tmp_path / "engine.log",
        ready_url=f"http://127.0.0.1:{port}/health",
        ready_timeout_seconds=60,
    ):
        found = Door(f"http://127.0.0.1:{port}")
        yield found
        found.close()


def write_run(path: Path, rows: int, *, seed: int = 0, longest: int = 96) -> Path:
    """A generation run of tokenised rows."""
    rng = np.random.default_rng(seed)
    with path.open("w") as handle:
        for row in range(rows):
            ids = rng.integers(16, 1000, rng.integers(8, longest)).tolist()
            handle.write(json.dumps({"id": f"r{row}", "input_ids": ids, "loss_mask": [0] * 4 + [1] * (len(ids) - 4)}) + "\n")
    return path


def parameters(run: Path | str, folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Parameters of a small run of the flow `extract`."""
    base: dict[str, dict[str, Any]] = {
        "input": {"runs": [str(run)]},
        "engine": {},
        "extraction": {"chunk_samples": 8, "recheck_samples": 0, "chunk_retries": 0, "in_flight": 4},
        "handoff": {"launch": False},
        "storage": {"folder": str(folder), "keep_free_gb": 0.01},
    }
    return {name: {**values, **sections.get(name, {})} for name, values in base.items()}
