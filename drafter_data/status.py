"""What a store holds, what is going on in it, and how long the rest will take."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from data_contracts.extraction import FAILURES_FOLDER
from data_contracts.handoff import MANIFEST_FILE, HandoffManifest
from data_contracts.plan import PLAN_FILE
from data_contracts.status import (
    VALIDATION_FILE,
    ChunkStatus,
    HandoffStatus,
    LeaseStatus,
    PlanStatus,
    StoreStatus,
    Throughput,
)
from data_contracts.validation import ValidationReport
from drafter_data.costs import CostModel, latest_costs
from drafter_data.dataset import Dataset
from drafter_data.extraction.chunk import read_failures
from drafter_data.files import write_atomic
from drafter_data.lengths import profile_lengths
from drafter_data.planning import load_plan, missing_samples, plan_folder
from drafter_data.report.history import history_of_receipts, latest_stretch
from drafter_data.report.training import read_curve
from drafter_data.stage_costs import following_stages
from drafter_data.store.store import Store
from drafter_data.workspace import DATASET_LINK, HANDOFF_LINK

KEPT_FINDINGS = 100


def store_status(store: Store) -> StoreStatus:
    """Looks at the receipts, plans, leases and kept costs of `store`; changes nothing."""
    store.refresh()
    costs = latest_costs(store.root)
    leases = lease_statuses(store)
    plans = sorted(path.parent for path in store.root.glob(f"plans/*/{PLAN_FILE}"))
    space = os.statvfs(store.root)
    return StoreStatus(
        store=str(store.root),
        identity=store.identity,
        states=len(store),
        bytes=sum(receipt.bytes for receipt in store.receipts()),
        free_bytes=space.f_bavail * space.f_frsize,
        plans=tuple(plan_status(store, path.name, leases, costs) for path in plans),
        leases=tuple(leases.values()),
        throughput=_throughput(store),
    )


def lease_statuses(store: Store) -> dict[str, LeaseStatus]:
    """Who holds which chunk, by chunk key."""
    return {
        key: LeaseStatus(chunk_key=key, holder=lease.holder, host=lease.host, expires_at=lease.expires_at, live=live)
        for key, (lease, live) in store.leases().items()
    }


def work_status(work: Path, store: Store) -> StoreStatus:
    """The status of a work folder's store, with the lengths of its latest dataset and its latest hand-off, where there are any."""
    found, dataset, handoff = store_status(store), work / DATASET_LINK, work / HANDOFF_LINK / MANIFEST_FILE
    lengths = profile_lengths(Dataset.open(dataset), bytes_per_token=store.identity.bytes_per_token) if dataset.exists() else None
    manifest = HandoffManifest.model_validate_json(handoff.read_bytes()) if handoff.is_file() else None
    told = HandoffStatus(manifest=manifest, curve=tuple(read_curve(manifest))) if manifest is not None else None
    return found.model_copy(update={"lengths": lengths, "handoff": told})


def keep_validation(store: Store, report: ValidationReport) -> None:
    """Keeps the report beside the plan of its dataset, where there is one: the latest, for `status`."""
    folder = plan_folder(store.root, report.dataset_id or "-")
    if folder.is_dir():
        few = report.model_copy(update={"findings": report.findings[:KEPT_FINDINGS]})
        write_atomic(folder / VALIDATION_FILE, few.model_dump_json(indent=2) + "\n")


def plan_status(store: Store, dataset_id: str, leases: dict[str, LeaseStatus], costs: CostModel | None) -> PlanStatus:
    """How far each chunk is, and the forecast of what is missing (in one pass over the plan)."""
    plan = load_plan(store.root, dataset_id)
    missing = missing_samples(store, plan)
    missing_c = np.bincount(missing.chunk_n, minlength=len(plan.chunks))
    tokens_c = np.bincount(missing.chunk_n, weights=missing.tokens_n, minlength=len(plan.chunks))
    failed, chunks = _failed_samples(store, dataset_id), list[ChunkStatus]()
    for chunk in plan.chunks:
        held = leases.get(chunk.key)
        chunks.append(
            ChunkStatus(
                index=chunk.index,
                key=chunk.key,
                samples=chunk.samples,
                done=chunk.samples - int(missing_c[chunk.index]),
                missing_tokens=int(tokens_c[chunk.index]),
                failed=failed.get(chunk.key, 0),
                holder=held.holder if held is not None and held.live else "",
            )
        )
    samples = sum(chunk.samples for chunk in chunks)
    forecast = None
    if costs is not None:
        per_token = store.identity.bytes_per_token
        forecast = costs.forecast(missing.tokens_n, in_flight=costs.usual_in_flight, bytes_per_token=per_token)
        following = following_stages(store.root, sum(chunk.tokens for chunk in plan.chunks) * per_token)
        forecast = forecast.model_copy(update={"following": following})
    return PlanStatus(
        dataset_id=dataset_id,
        samples=samples,
        done=samples - len(missing.tokens_n),
        missing=len(missing.tokens_n),
        excluded=len(plan.excluded),
        chunks=tuple(chunks),
        forecast=forecast,
        validation=_kept_validation(store, dataset_id),
    )


def _failed_samples(store: Store, dataset_id: str) -> dict[str, int]:
    """How many samples each chunk has written down as failed that the store still lacks."""
    written = [path.stem for path in (plan_folder(store.root, dataset_id) / FAILURES_FOLDER).glob("*.json")]
    found = [read_failures(store.root, dataset_id, key) for key in written]
    return {one.chunk_key: sum(failure.state_key not in store for failure in one.failures) for one in found if one is not None}


def _kept_validation(store: Store, dataset_id: str) -> ValidationReport | None:
    """None also where another version kept it: it is for people, and made again by each run."""
    try:
        return ValidationReport.model_validate_json((plan_folder(store.root, dataset_id) / VALIDATION_FILE).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def _throughput(store: Store) -> Throughput | None:
    receipts = list(store.receipts())
    since = latest_stretch([receipt.committed_at for receipt in receipts])
    history = history_of_receipts(receipts, sum(receipt.tokens for receipt in receipts), since=since)
    if history is None:
        return None
    return Throughput(
        started_at=since, ended_at=since + float(history.elapsed_n[-1]), tokens_per_second=tuple(map(float, history.rate_n[1:]))
    )
