"""`python -m flows.lost_runs`: an automation that marks lost runs Crashed and tells somebody.

A worker that dies with its flow runs (power, kernel, `kill -9` of both) leaves them Running for ever: nobody says so. Each
run sends a heartbeat (PREFECT_FLOWS_HEARTBEAT_FREQUENCY, 180 s); the server misses the next one and acts. A run that is marked
Crashed is retried like a failed one: what has a receipt is not extracted again.
"""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta
from typing import Any
from uuid import UUID

from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import CallWebhook, ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

AUTOMATION = "drafter-data: mark lost runs crashed"
BLOCK = "drafter-data-alerts"
HEARTBEAT = "prefect.flow-run.heartbeat"
MISSED_HEARTBEATS = 3
DEFAULT_SECONDS = 540
_ENDS = ("Completed", "Skipped", "Failed", "TimedOut", "Crashed", "Cancelled")
_PAUSES = ("Cancelling", "Paused", "Suspended", "AwaitingRetry")
"""States after which no heartbeat is due, by name: the events have no other. `Skipped` is a night beside another run."""
_HEARD = {HEARTBEAT, *(f"prefect.flow-run.{name}" for name in (*_ENDS, *_PAUSES))}
_PAYLOAD = (
    '{"text": "flow run {{ flow_run.name }} is lost: no heartbeat; marked Crashed. Look at its host, then Retry. '
    '{{ flow_run|ui_url }}"}'
)


def lost_runs(within_seconds: int, webhook: UUID | None) -> AutomationCore:
    """The automation: no heartbeat within that time after the one before, and neither an end nor a pause."""
    actions: list[Any] = [
        ChangeFlowRunState(
            state=StateType.CRASHED, name="Crashed", message=f"lost: no heartbeat for {within_seconds} s", force=False
        )
    ]
    if webhook is not None:
        actions.append(CallWebhook(block_document_id=webhook, payload=_PAYLOAD))
    trigger = EventTrigger(
        after={HEARTBEAT},
        expect=_HEARD,
        match={"prefect.resource.id": ["prefect.flow-run.*"]},  # pyright: ignore[reportArgumentType] - coerced by the model
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=within_seconds),
    )
    about = "A run whose worker and process died together says nothing; its heartbeat is missed."
    return AutomationCore(name=AUTOMATION, description=about, trigger=trigger, actions=actions)


def install(within_seconds: int, alert_url: str | None) -> UUID:
    """Makes the automation and its webhook block, or puts these settings into those that are there. Returns the automation's id."""
    webhook: UUID | None = None
    if alert_url is not None:
        webhook = UUID(str(Webhook(method="POST", url=alert_url).save(BLOCK, overwrite=True, _sync=True)))  # pyright: ignore
    wanted = lost_runs(within_seconds, webhook)
    with get_client(sync_client=True) as client:
        for old in client.read_automations_by_name(AUTOMATION):
            client.delete_automation(old.id)
        return client.create_automation(wanted)


def main() -> int:
    """Exit 0 installed."""
    parser = argparse.ArgumentParser(prog="python -m flows.lost_runs", description="Mark lost runs Crashed, and tell a webhook.")
    parser.add_argument("--within", type=int, default=DEFAULT_SECONDS, help="seconds without a heartbeat (three heartbeats)")
    parser.add_argument("--alert-url", help="an HTTP address that takes POST with JSON (Slack, Mattermost, your own)")
    given = parser.parse_args()
    automation = install(given.within, given.alert_url)
    sys.stdout.write(f"automation {automation}: lost runs are marked Crashed after {given.within} s without a heartbeat\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
