"""Runs of other deployments that a run has sent and waits for."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.states import Cancelling

from tasks.publishing import run_logger

OPEN_STATES = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED]
"""Of a run that may still do what it was sent for."""


def cancel_sent(client: SyncPrefectClient, run_ids: Iterable[UUID], message: str) -> None:
    """Cancels runs whose sender ends. One that cannot be cancelled neither keeps the others going nor hides why the sender ends."""
    for run_id in run_ids:
        try:
            client.set_flow_run_state(run_id, Cancelling(message=message))
        except Exception as error:  # noqa: BLE001 - whatever it is, the sender ends for a reason of its own
            run_logger().warning("flow run %s could not be cancelled (%s): look at it in the UI", run_id, error)
