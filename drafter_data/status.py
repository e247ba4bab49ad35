"""What a store holds, what is going on in it, and how long the rest will take."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from data_contracts.plan import PLAN_FILE, SAMPLES_FILE
from data_contracts.status import ChunkStatus, LeaseStatus, PlanStatus, StoreStatus
from drafter_data.costs import CostModel, latest_costs
from drafter_data.planning import load_plan, plan_folder
from drafter_data.safetensors_file import NUMPY_DTYPES
from drafter_data.store.store import Store


def store_status(store: Store) -> StoreStatus:
    """Looks at the receipts, plans, leases and kept costs of `store`; changes nothing."""
    store.refresh()
    costs = latest_costs(store.root)
    leases = {
        key: LeaseStatus(chunk_key=key, holder=lease.holder, host=lease.host, expires_at=lease.expires_at, live=live)
        for key, (lease, live) in store.leases().items()
    }
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


def plan_status(store: Store, dataset_id: str, leases: dict[str, LeaseStatus], costs: CostModel | None) -> PlanStatus:
    """How far each chunk is, and the forecast of what is missing (reads one row group at a time)."""
    plan = load_plan(store.root, dataset_id)
    chunks: list[ChunkStatus] = []
    missing: list[np.ndarray] = []
    with pq.ParquetFile(_samples_path(store.root, dataset_id)) as file:
        for chunk in plan.chunks:
            table = file.read_row_group(chunk.index, columns=["state_key", "num_tokens"])
            tokens_n = table.column("num_tokens").to_numpy()
            fits_n = tokens_n <= plan.max_prompt_tokens
            absent_n = np.array([key not in store for key in table.column("state_key").to_pylist()], dtype=bool) & fits_n
            missing.append(tokens_n[absent_n])
            held = leases.get(chunk.key)
            chunks.append(
                ChunkStatus(
                    index=chunk.index,
                    key=chunk.key,
                    samples=int(fits_n.sum()),
                    done=int(fits_n.sum() - absent_n.sum()),
                    missing_tokens=int(tokens_n[absent_n].sum()),
                    holder=held.holder if held is not None and held.live else "",
                )
            )
    remaining_n = np.concatenate(missing) if missing else np.zeros(0, dtype=np.int32)
    samples = sum(chunk.samples for chunk in chunks)
    return PlanStatus(
        dataset_id=dataset_id,
        samples=samples,
        done=samples - len(remaining_n),
        missing=len(remaining_n),
        excluded=len(plan.excluded),
        chunks=tuple(chunks),
        forecast=costs.forecast(remaining_n, in_flight=costs.usual_in_flight, bytes_per_token=bytes_per_token(store))
        if costs is not None
        else None,
    )


def bytes_per_token(store: Store) -> int:
    """Bytes of a stored token: its states and its id."""
    identity = store.identity
    return len(identity.layers) * identity.hidden_size * np.dtype(NUMPY_DTYPES[identity.dtype]).itemsize + 8


def _samples_path(root: Path, dataset_id: str) -> Path:
    return plan_folder(root, dataset_id) / SAMPLES_FILE
