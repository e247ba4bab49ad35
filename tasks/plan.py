"""Stages 4 and 5: which chunk brings which states, and how long that will take."""

from __future__ import annotations

from pathlib import Path

from prefect import task

from data_contracts.forecast import Forecast
from data_contracts.parameters import ExtractionParameters
from data_contracts.plan import Chunk
from data_contracts.preflight import PreflightReport
from drafter_data.costs import CostModel, costs_path
from drafter_data.dataset import Dataset
from drafter_data.extraction.campaign import pending_chunks, plan_over
from drafter_data.planning import load_plan, missing_samples
from drafter_data.stage_costs import following_stages
from drafter_data.store.store import Store
from drafter_data.units import duration, gigabytes
from drafter_data.workspace import Workspace
from tasks.publishing import STAGE, publish_facts, say


@task(name="plan", task_run_name="plan of {dataset.name:.12}", **STAGE)
def make_plan(
    workspace: Workspace,
    dataset: Path,
    extraction: ExtractionParameters,
    checked: PreflightReport,
) -> list[Chunk]:
    """Makes the plan, or keeps the one that is there; returns its chunks that still lack states."""
    plan = plan_over(Dataset.open(dataset), workspace.store, extraction, checked)
    store = Store.open(workspace.store)
    try:
        pending = pending_chunks(plan, store)
    finally:
        store.close()
    say(
        f"plan: {len(plan.chunks)} chunks, {len(plan.chunks) - len(pending)} of them complete, {len(plan.excluded):,} rows "
        f"excluded, {plan.already_stored:,} states stored before"
    )
    return [plan.chunks[index] for index in pending]


@task(name="eta", task_run_name="eta of {dataset_id:.12}", **STAGE)
def forecast(
    workspace: Workspace,
    dataset_id: str,
    checked: PreflightReport,
) -> Forecast:
    """Publishes time and bytes to come, from this engine's history or the preflight's probes."""
    store = Store.open(workspace.store)
    try:
        plan = load_plan(workspace.store, dataset_id)
        remaining = missing_samples(store, plan).tokens_n
    finally:
        store.close()
    costs = CostModel.load(costs_path(workspace.store, checked.fingerprint))
    found = costs.forecast(remaining, in_flight=checked.first_in_flight, bytes_per_token=checked.bytes_per_token)
    all_bytes = sum(chunk.tokens for chunk in plan.chunks) * checked.bytes_per_token
    found = found.model_copy(update={"following": following_stages(workspace.store, all_bytes)})
    fit = costs.fit(in_flight=checked.first_in_flight)
    publish_facts(
        "forecast",
        "Before the first sample of this run; the extraction's progress refines it",
        {
            "samples to extract": found.samples,
            "tokens": found.tokens,
            "extraction": f"{duration(found.seconds)} ({duration(found.low_seconds)} to {duration(found.high_seconds)}, 90 %)",
            **{
                f"then {one.stage}": f"{duration(one.seconds)}{'' if one.runs else ' (assumed: it has not run on this store yet)'}"
                for one in found.following
            },
            "all until the hand-off": duration(found.total_seconds),
            "bytes": gigabytes(found.bytes),
            "a request": f"{fit.fixed_seconds * 1e3:.2f} ms + {fit.linear_seconds_per_token * 1e6:.2f} us a token",
            "from": f"{fit.observations:,} requests observed" if fit.observations else "a guess: nothing observed yet",
        },
    )
    return found
