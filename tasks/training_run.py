"""Training as a run of another deployment: sent once, followed to its end, cancelled with its sender."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import cast
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound

from data_contracts.handoff import HandoffManifest
from drafter_data.errors import TrainingFailed, UsageError
from tasks.publishing import say
from tasks.sent_runs import OPEN_STATES, cancel_sent

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


def train_by_deployment(name: str, manifest: HandoffManifest, command: Sequence[str]) -> float:
    """Runs the deployment on a hand-off and waits for its end. When the caller is cancelled, so is the run.

    A run that an earlier try has sent for this hand-off and that is still open is waited for; no second one is sent. Returns when
    the run was sent (Unix seconds). Raises TrainingFailed (`training-run-failed`) with the run's own message when it did not
    complete.
    """
    check_deployment(name)
    with get_client(sync_client=True) as client:
        tag = f"handoff-{hashlib.blake2b(manifest.folder.encode(), digest_size=8).hexdigest()}"
        sent_at, sent = time.time(), _adopted(client, tag)
        if sent is None:
            given = {"handoff": manifest.folder, "command": list(command)}
            run_name = f"train-{manifest.trainer}-on-{manifest.dataset_id[:12]}"
            sent = cast(FlowRun, run_deployment(name, parameters=given, flow_run_name=run_name, timeout=0, tags=[tag]))
            say(f"sent {run_name} to {name}")
        elif sent.created is not None:
            sent_at = sent.created.timestamp()
        try:
            run = _wait(client, sent.id)
        except BaseException:
            cancel_sent(client, [sent.id], "the run that sent this one has ended")
            raise
    if run is None:
        raise TrainingFailed(f"run {sent.name} of deployment {name} was deleted", reason="training-run-failed")
    assert run.state is not None
    if not run.state.is_completed():
        raise TrainingFailed(
            f"run {run.name} of deployment {name} ended {run.state.name}: {run.state.message or 'without a message'}",
            reason="training-run-failed",
        )
    return sent_at


def _adopted(client: SyncPrefectClient, tag: str) -> FlowRun | None:
    """The run that an earlier try has sent and that goes on. One that is being cancelled still trains until it has ended."""
    states = FlowRunFilterState(type=FlowRunFilterStateType(any_=[*OPEN_STATES, StateType.CANCELLING]))
    for run in client.read_flow_runs(flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=[tag]), state=states)):
        if run.state_type is not StateType.CANCELLING:
            say(f"run {run.name} of an earlier try still trains on this hand-off: waited for, not sent again")
            return run
        say(f"run {run.name} of an earlier try is being cancelled: waited for; if its host is gone, set it Cancelled in the UI")
        _wait(client, run.id)
    return None


def _wait(client: SyncPrefectClient, run_id: UUID) -> FlowRun | None:
    """The run as it has ended; None where it was deleted."""
    while True:
        try:
            run = client.read_flow_run(run_id)
        except ObjectNotFound:
            return None
        if run.state is not None and run.state.is_final():
            return run
        time.sleep(POLL_SECONDS)
