"""Stage 3: what would fail after hours is refused in seconds."""

from __future__ import annotations

from pathlib import Path

from prefect import task

from data_contracts.parameters import EngineParameters, ExtractionParameters
from data_contracts.preflight import PreflightReport
from drafter_data.dataset import Dataset
from drafter_data.extraction.campaign import check_engine
from drafter_data.preflight import bytes_to_come
from drafter_data.store.store import Store
from drafter_data.trainers.handoff import check_space
from drafter_data.trainers.registry import trainer_named
from drafter_data.workspace import Workspace
from tasks.publishing import STAGE, publish_facts, say


@task(name="preflight", task_run_name="preflight of {engine.kind} at {engine.url}", **STAGE)
def check(
    workspace: Workspace, dataset: Path, engine: EngineParameters, extraction: ExtractionParameters, trainer: str | None
) -> PreflightReport:
    """Engine, dump folder, store, disk and the trainer's needs, with real requests. Publishes what was found."""
    opened = Dataset.open(dataset)
    report = check_engine(opened, workspace.store, engine, extraction, keep_free_bytes=workspace.keep_free_bytes)
    if trainer is not None:
        _check_trainer(workspace, opened, report, trainer)
    publish_facts("preflight", f"{report.engine} at {report.url}: ready", preflight_facts(report))
    for note in report.notes:
        say(f"preflight: {note}")
    return report


def _check_trainer(workspace: Workspace, dataset: Dataset, report: PreflightReport, trainer: str) -> None:
    store = Store.open(workspace.store, report.identity)
    try:
        to_come = bytes_to_come(dataset, workspace.store, report.identity, report.max_prompt_tokens)
        check_space(trainer_named(trainer), dataset, store, workspace.folder / "handoffs", workspace.keep_free_bytes, to_come)
    finally:
        store.close()


def preflight_facts(report: PreflightReport) -> dict[str, object]:
    """What was found, for people."""
    identity, canary = report.identity, report.canary
    facts: dict[str, object] = {
        "engine": f"{report.engine} {report.provenance.engine_version}",
        "model": report.provenance.model,
        "layers (Hugging Face indices)": ", ".join(map(str, identity.layers)),
        "final state": f"{identity.final_norm} the final norm, {identity.dtype}",
        "bytes a token": report.bytes_per_token,
        "requests in flight": f"{report.first_in_flight} at first, at most {report.in_flight}",
        "longest prompt (tokens)": report.max_prompt_tokens,
        "canary": f"{canary.requests} requests, {canary.tokens_per_second:,.0f} tokens/s alone",
        "same prompt twice differs by": f"{canary.repeat_error:.1e} (tolerated {canary.tolerance:.1e})",
        "log-probabilities differ by": "not checked" if canary.proof_error is None else f"{canary.proof_error:.1e} nats",
    }
    return facts | {f"note {number}": note for number, note in enumerate(report.notes, start=1)}
