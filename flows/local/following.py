"""Sending a deployment and following its run over the API, as the UI shows it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

import requests

from flows.local.services import ServiceFailed, Services

TERMINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
INFO = 20
POLL_SECONDS = 0.5
_ROUTINE = ("Finished in state Completed", "Worker '", "Running 1 deployment", "Executing deployment", "Deployment step", "All dep")
"""What Prefect says of every run; it is in the UI."""


def send(services: Services, deployment: str, parameters: Mapping[str, Any]) -> str:
    """`prefect deployment run DEPLOYMENT`, literally; returns the id of the flow run."""
    name = f"{deployment}-{uuid4().hex[:8]}"
    services.prefect(["deployment", "run", deployment, "--params", json.dumps(dict(parameters)), "--flow-run-name", name])
    found = _post(services, "flow_runs/filter", {"flow_runs": {"name": {"any_": [name]}}})
    if len(found) != 1:
        raise ServiceFailed(f"sent a run of {deployment} named {name}, the server knows {len(found)} of it")
    return str(found[0]["id"])


def follow(services: Services, run_id: str, say: Callable[[str], None], *, timeout_seconds: float) -> dict[str, Any]:
    """Says each log line as it comes, until the run has ended; returns the flow run. Raises ServiceFailed after the timeout."""
    deadline, said = time.monotonic() + timeout_seconds, 0
    while True:
        try:
            run, lines = read_run(services, run_id), logs(services, run_id, said)
        except requests.RequestException as error:
            if time.monotonic() > deadline:
                raise ServiceFailed(f"the Prefect server at {services.api} does not answer: {error}") from error
            time.sleep(POLL_SECONDS)
            continue
        for line in lines:
            if not str(line["message"]).startswith(_ROUTINE):
                say(f"{str(line['timestamp'])[11:19]}  {line['message']}")
        said += len(lines)
        if run["state_type"] in TERMINAL and not lines:
            return run
        if time.monotonic() > deadline:
            raise ServiceFailed(f"flow run {run['name']} is still {run['state_name']} after {timeout_seconds:.0f} s")
        time.sleep(POLL_SECONDS)


def read_run(services: Services, run_id: str) -> dict[str, Any]:
    """The flow run as the API gives it."""
    reply = services.call("GET", f"flow_runs/{run_id}")
    reply.raise_for_status()
    return reply.json()


def logs(services: Services, run_id: str, offset: int = 0) -> list[dict[str, Any]]:
    """Log records of a flow run and its tasks, oldest first, from level INFO up."""
    wanted = {"flow_run_id": {"any_": [run_id]}, "level": {"ge_": INFO}}
    return _post(services, "logs/filter", {"logs": wanted, "sort": "TIMESTAMP_ASC", "offset": offset, "limit": 200})


def artifact(services: Services, run_id: str, key: str) -> dict[str, Any] | None:
    """The latest artifact of a run under a key; tables come with their rows in `rows`."""
    wanted = {"flow_run_id": {"any_": [run_id]}, "key": {"any_": [key]}}
    found = _post(services, "artifacts/filter", {"artifacts": wanted, "sort": "UPDATED_DESC", "limit": 1})
    if not found:
        return None
    rows = json.loads(found[0]["data"]) if found[0]["type"] == "table" else []
    return {**found[0], "rows": rows}


def _post(services: Services, route: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    reply = services.call("POST", route, dict(body))
    reply.raise_for_status()
    return reply.json()
