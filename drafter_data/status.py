"""What a store holds, what is going on in it, and how long the rest will take."""

from __future__ import annotations

import os

import numpy as np

from data_contracts.extraction import FAILURES_FOLDER
from data_contracts.plan import PLAN_FILE
from data_contracts.status import ChunkStatus, LeaseStatus, PlanStatus, StoreStatus
from drafter_data.costs import CostModel, latest_costs
from drafter_data.extraction.chunk import read_failures
from drafter_data.planning import load_plan, missing_samples, plan_folder
from drafter_data.store.store import Store


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
    )


def lease_statuses(store: Store) -> dict[str, LeaseStatus]:
    """Who holds which chunk, by chunk key."""
    return {
        key: LeaseStatus(chunk_key=key, holder=lease.holder, host=lease.host, expires_at=lease.expires_at, live=live)
        for key, (lease, live) in store.leases().items()
    }


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
    return PlanStatus(
        dataset_id=dataset_id,
        samples=samples,
        done=samples - len(missing.tokens_n),
        missing=len(missing.tokens_n),
        excluded=len(plan.excluded),
        chunks=tuple(chunks),
        forecast=costs.forecast(missing.tokens_n, in_flight=costs.usual_in_flight, bytes_per_token=store.identity.bytes_per_token)
        if costs is not None
        else None,
    )


def _failed_samples(store: Store, dataset_id: str) -> dict[str, int]:
    """How many samples each chunk has written down as failed that the store still lacks."""
    written = [path.stem for path in (plan_folder(store.root, dataset_id) / FAILURES_FOLDER).glob("*.json")]
    found = [read_failures(store.root, dataset_id, key) for key in written]
    return {one.chunk_key: sum(failure.state_key not in store for failure in one.failures) for one in found if one is not None}
