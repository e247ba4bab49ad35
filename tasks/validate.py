"""Stages 7 and 8: every sample or a reason, and the gate before the hand-off."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from prefect import task

from data_contracts.extraction import ChunkFailures, GateReport
from data_contracts.parameters import ExtractionParameters
from data_contracts.validation import ValidationReport
from drafter_data.costs import CostModel, latest_costs
from drafter_data.dataset import Dataset
from drafter_data.gate import judge, require_open
from drafter_data.planning import load_plan, make_plan
from drafter_data.remedies import remedy
from drafter_data.report.drawing import embedded
from drafter_data.report.pictures import norms_picture
from drafter_data.report.text import markdown_table, rechecks_text
from drafter_data.stage_costs import observe_stage
from drafter_data.status import keep_validation
from drafter_data.store.store import Store
from drafter_data.units import gigabytes
from drafter_data.validation import validate_store
from drafter_data.validation.state_file import UNREADABLE
from drafter_data.workspace import Workspace
from tasks.publishing import STAGE, publish_page, publish_table, say

SHOWN_FINDINGS = 100


@task(name="gate", task_run_name="gate after {stage}: at most {max_error_rate:.2%} failed", **STAGE)
def pass_gate(
    workspace: Workspace,
    dataset_id: str,
    max_error_rate: float,
    stage: str,  # noqa: ARG001 - for the task run's name
    causes: dict[int, str],
) -> GateReport:
    """Publishes the chunks that failed: which, why, what to do. Raises GateClosed when too many samples did.

    `causes` says, by chunk index, how its task ended.
    """
    store = Store.open(workspace.store)
    try:
        report = judge(load_plan(workspace.store, dataset_id), store, max_error_rate=max_error_rate)
    finally:
        store.close()
    if report.failed_chunks:
        rows = [failed_row(chunk, causes.get(chunk.chunk_index, "")) for chunk in report.failed_chunks]
        publish_table("failed-chunks", _gate_summary(report), rows)
    require_open(report)
    say(_gate_summary(report))
    return report


@task(name="validate", task_run_name="validate {dataset.name:.12}", **STAGE)
def validate(workspace: Workspace, dataset: Path) -> ValidationReport:
    """Reads every state of the dataset. What is damaged leaves the store, so that the gate counts it and a retry brings it anew."""
    store = Store.open(workspace.store)
    try:
        opened = Dataset.open(dataset)
        report = validate_store(store, opened)
        damaged = damaged_states(store, report)
        store.discard(damaged)
        if damaged or report.missing:
            plan_again(store, opened)
        keep_validation(store, report)
        observe_stage(store.root, "validate", report.bytes, report.seconds)
    finally:
        store.close()
    told = _validation_summary(report)
    norms = embedded(norms_picture(report.layers), "Root mean square by layer") if report.layers else ""
    again = rechecks_text(report.rechecks) if report.rechecks is not None else ""
    publish_page("validation", told, norms, again, markdown_table(validation_rows(report)))
    say(_validation_summary(report))
    return report


def plan_again(store: Store, dataset: Dataset) -> None:
    """Puts what the store lacks by now into chunks: a state that an earlier dataset brought is in no chunk of this plan."""
    plan = load_plan(store.root, dataset.record.dataset_id)
    most = max((chunk.samples for chunk in plan.chunks), default=ExtractionParameters().chunk_samples)
    costs = latest_costs(store.root) or CostModel()
    make_plan(dataset, store, costs, chunk_samples=most, max_prompt_tokens=plan.max_prompt_tokens)


def damaged_states(store: Store, report: ValidationReport) -> dict[str, str]:
    """States whose own file is wrong, and why. A finding about a dataset row, or a disk that does not read, condemns no state."""
    return {
        found.state_key: found.reason
        for found in report.findings
        if found.state_key in store and found.file == str(store.path_of(found.state_key)) and found.reason != UNREADABLE
    }


def failed_row(chunk: ChunkFailures, ended: str) -> dict[str, object]:
    """One failed chunk: which, why, what to do."""
    reasons = Counter(failure.reason for failure in chunk.failures)
    cause = chunk.stopped_by or reasons.most_common(1)[0][0]
    return {
        "chunk": chunk.chunk_index,
        "failed samples": len(chunk.failures),
        "why": ", ".join(f"{reason} {count}" for reason, count in reasons.most_common()),
        "for example": ended or chunk.failures[0].detail,
        "what to do": remedy(cause),
    }


def validation_rows(report: ValidationReport) -> list[dict[str, object]]:
    """Findings, or the figures where there are none."""
    if report.findings:
        return [
            {"reason": one.reason, "where": one.file, "expected": one.expected, "found": one.found, "what to do": one.remedy}
            for one in report.findings[:SHOWN_FINDINGS]
        ]
    layers: list[dict[str, object]] = [
        {"layer": one.layer, "RMS p1": f"{one.rms_p01:.4g}", "p50": f"{one.rms_p50:.4g}", "p99": f"{one.rms_p99:.4g}"}
        for one in report.layers
    ]
    return layers or [{"samples": report.samples, "errors": 0}]


def _gate_summary(report: GateReport) -> str:
    return (
        f"{report.stored:,} of {report.planned:,} planned samples stored, {report.failed:,} failed ({report.error_rate:.2%}, "
        f"limit {report.max_error_rate:.2%}), {report.excluded:,} excluded"
    )


def _validation_summary(report: ValidationReport) -> str:
    return (
        f"{report.samples:,} samples, {report.states:,} states, {gigabytes(report.bytes)} read in {report.seconds:.1f} s: "
        f"{report.errors} errors, {report.missing} missing"
    )
