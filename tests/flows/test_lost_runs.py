"""What the automation for lost runs takes as a sign that a run is not lost."""

from __future__ import annotations

from prefect.states import AwaitingRetry, Cancelled, Cancelling, Completed, Crashed, Failed, Paused, Suspended

from flows.lost_runs import HEARTBEAT, lost_runs
from flows.refresh import SKIPPED


def test_run_that_has_ended_or_pauses_under_any_name_is_not_lost() -> None:
    states = [
        Completed(),
        Completed(name=SKIPPED),
        Failed(),
        Crashed(),
        Cancelled(),
        Cancelling(),
        Paused(),
        Suspended(),
        AwaitingRetry(),
    ]
    expected = lost_runs(60, None).trigger.expect  # pyright: ignore[reportAttributeAccessIssue] - it is an event trigger
    assert {f"prefect.flow-run.{state.name}" for state in states} | {HEARTBEAT} <= set(expected)
