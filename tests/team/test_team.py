"""The set-up for a team: PostgreSQL, a password, and lost runs that are found and told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import requests

from drafter_data.dataset import Dataset
from drafter_data.store.store import Store
from drafter_data.validation import validate_store
from flows.local.following import follow, read_run, send
from flows.local.processes import descendants
from flows.local.services import CHECKOUT, Services
from tests.docs.test_commands import commands_of
from tests.flows.conftest import parameters, write_run
from tests.team.conftest import Cluster

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(1500)]
WITHIN_SECONDS = 90
LIMIT_SECONDS = 300.0


class Alerts(HTTPServer):
    """Takes what a webhook is sent."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        alerts = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                alerts.texts.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
                """Silent."""

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


def test_main_job_on_postgres_with_a_password_and_a_lost_run_marked_crashed_and_told(
    team_services: Services, cluster: Cluster, tmp_path: Path
) -> None:
    services, alerts = team_services, Alerts()
    assert requests.get(f"{services.api}/flows/count", timeout=30).status_code in (401, 405)
    assert requests.post(f"{services.api}/flows/filter", json={}, timeout=30).status_code == 401, "nobody without the password"
    install_automation(services, f"http://127.0.0.1:{alerts.server_port}/")

    work = tmp_path / "main"
    run_id = send(services, "extract-100k", parameters(write_run(tmp_path / "run.jsonl", 20), work, handoff={"launch": True}))
    assert follow(services, run_id, print, timeout_seconds=LIMIT_SECONDS)["state_type"] == "COMPLETED"
    assert validate_store(Store.open(work / "store"), Dataset.open(work / "dataset")).errors == 0
    assert cluster.ask(f"select state_type from flow_run where id = '{run_id}'") == "COMPLETED"

    lost_work = tmp_path / "lost"
    given = parameters(write_run(tmp_path / "long.jsonl", 400, longest=1500), lost_work, extraction={"in_flight": 1})
    lost = send(services, "extract-100k", given)
    wait_for(lambda: bool(list(lost_work.glob("store/states/*/*.safetensors"))))
    killed_at = time.monotonic()
    kill_worker_and_flow(services)
    wait_for(lambda: read_run(services, lost)["state_type"] == "CRASHED")
    print(f"marked crashed {time.monotonic() - killed_at:.0f} s after the kill")
    assert "no heartbeat" in read_run(services, lost)["state"]["message"]
    wait_for(lambda: bool(alerts.texts))
    assert "is lost" in json.loads(alerts.texts[0])["text"] and lost in alerts.texts[0]
    assert read_run(services, run_id)["state_type"] == "COMPLETED", "an ended run is left alone"


def install_automation(services: Services, alert_url: str) -> None:
    """As the runbook says, twice: the second replaces the first."""
    script = "\n".join(commands_of("docs/team.md"))
    assert "--within 180" in script and "http://127.0.0.1:9/alerts" in script
    script = script.replace("--within 180", f"--within {WITHIN_SECONDS}").replace("http://127.0.0.1:9/alerts", alert_url)
    environment = {**services.environment(), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for _ in range(2):
        done = subprocess.run(["bash", "-euc", script], cwd=CHECKOUT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert len(services.call("POST", "automations/filter", {}).json()) == 1


def kill_worker_and_flow(services: Services) -> None:
    """SIGKILL to the worker first, so that it cannot say what becomes of its runs, then to all that it started."""
    worker = next(process for process in services.running() if process.name == "worker")
    family = descendants(worker.pid)
    for process in (worker, *family):
        if process.alive():
            os.kill(process.pid, signal.SIGKILL)


def wait_for(happened: Callable[[], bool]) -> None:
    """Until something has happened."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.2)
