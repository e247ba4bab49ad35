"""Training as a run of another deployment: sent, followed to its end, cancelled with its sender."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling

from data_contracts.handoff import HandoffManifest
from drafter_data.errors import TrainingFailed, UsageError
from tasks.publishing import say

POLL_SECONDS = 2.0


def check_deployment(name: str) -> None:
    """Raises UsageError when the server knows no deployment of that name that takes `handoff` and `command`."""
    with get_client(sync_client=True) as client:
        try:
            found = client.read_deployment_by_name(name)
        except (ObjectNotFound, ValueError) as error:  # ValueError: a name without a slash
            raise UsageError(
                f"training deployment {name!r}: the Prefect server has none of that name; `prefect deployment ls` lists them",
                reason="deployment-missing",
            ) from error
    schema = found.parameter_openapi_schema
    missing = {"handoff", "command"} - set((schema or {}).get("properties", {}))
    if missing:
        raise UsageError(
            f"training deployment {name}: its flow has no parameter {' and '.join(sorted(missing))}; expected handoff (a folder) "
            "and command (a list of arguments)",
            reason="deployment-parameters",
        )


def train_by_deployment(name: str, manifest: HandoffManifest, command: Sequence[str]) -> None:
    """Runs the deployment on a hand-off and waits for its end. When the caller is cancelled, so is the run.

    Raises TrainingFailed (`training-run-failed`) with the run's own message when it did not complete.
    """
    check_deployment(name)
    with get_client(sync_client=True) as client:
        given = {"handoff": manifest.folder, "command": list(command)}
        run_name = f"train-{manifest.trainer}-on-{manifest.dataset_id[:12]}"
        sent = cast(FlowRun, run_deployment(name, parameters=given, flow_run_name=run_name, timeout=0)).id
        say(f"sent {run_name} to {name}")
        try:
            run = _wait(client, sent)
        except BaseException:
            client.set_flow_run_state(sent, Cancelling(message="the run that sent this one has ended"))
            raise
    assert run.state is not None
    if not run.state.is_completed():
        raise TrainingFailed(
            f"run {run.name} of deployment {name} ended {run.state.name}: {run.state.message or 'without a message'}",
            reason="training-run-failed",
        )


def _wait(client: SyncPrefectClient, run_id: UUID) -> FlowRun:
    while True:
        run = client.read_flow_run(run_id)
        if run.state is not None and run.state.is_final():
            return run
        time.sleep(POLL_SECONDS)
