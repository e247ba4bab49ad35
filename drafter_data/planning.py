"""Planning: which chunk brings which states. Made once per dataset and store, then kept (data_contracts/plan.py has the layout).

Chunks are runs of the dataset's rows, cut at equal predicted cost. Rows are sorted by a hash of their content, so a run is a fair
mixture of lengths, and a chunk is read from one or two row groups of the dataset. Inside a chunk neighbours differ in length.

A kept plan is returned as it is, even if the store has filled meanwhile. It changes only where it could not do its work any more,
and then so that chunk indices and keys keep their meaning:
* states that no chunk brings and that the store does not hold (dropped by fsck, or too long for the engine until now) become
  further chunks at the end;
* with a lower `max_prompt_tokens`, rows that are too long now are listed as excluded and left out of `chunk_rows`.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import ValidationError

from data_contracts.identity import chunk_key
from data_contracts.plan import PLAN_FILE, SAMPLE_COLUMNS, SAMPLES_FILE, Chunk, Exclusion, Plan
from drafter_data.costs import CostModel, predicted_seconds
from drafter_data.dataset import Dataset, arrow_schema
from drafter_data.errors import InputError
from drafter_data.files import atomic_path, write_atomic
from drafter_data.store.store import Store

SAMPLES_SCHEMA = arrow_schema(SAMPLE_COLUMNS)
APART = 16
"""Requests in flight that the order inside a chunk keeps apart in length."""
Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlannedSample:
    """One state to bring: `row` of the dataset that carries its token ids."""

    row: int
    state_key: str
    num_tokens: int


def plan_folder(store_root: Path, dataset_id: str) -> Path:
    """Where the plan of a dataset over a store is kept."""
    return store_root / "plans" / dataset_id


def make_plan(dataset: Dataset, store: Store, costs: CostModel, *, chunk_samples: int, max_prompt_tokens: int) -> Plan:
    """The kept plan of `dataset` over `store`, or a new one of chunks of about `chunk_samples` and equal predicted cost.

    Memory: four columns of the dataset (no ids, no masks). Raises InputError when a kept plan cannot be read.
    """
    folder = plan_folder(store.root, dataset.record.dataset_id)
    folder.mkdir(parents=True, exist_ok=True)
    with _planning_lock(folder):
        columns = dataset.columns("sample_key", "state_key", "num_tokens", "num_supervised")
        tokens_r = columns.column("num_tokens").to_numpy()
        supervised_r = columns.column("num_supervised").to_numpy()
        kept = load_plan(store.root, dataset.record.dataset_id) if (folder / PLAN_FILE).is_file() else None
        table = _read_samples(folder) if kept is not None else SAMPLES_SCHEMA.empty_table()
        rows, keys = _first_rows(columns, (tokens_r <= max_prompt_tokens) & (supervised_r > 0))
        planned = set(table.column("state_key").to_pylist())
        new = np.fromiter((key not in planned and key not in store for key in keys), dtype=bool, count=len(keys))
        if kept is not None and not new.any() and kept.max_prompt_tokens == max_prompt_tokens:
            return kept
        first = len(kept.chunks) if kept is not None else 0
        chunks, groups = _chunks_of(columns, tokens_r, rows[new], costs, chunk_samples, first)
        plan = Plan(
            dataset_id=dataset.record.dataset_id,
            chunks=(*(_under_limit(kept, table, max_prompt_tokens) if kept is not None else ()), *chunks),
            already_stored=kept.already_stored if kept is not None else len(keys) - int(new.sum()),
            excluded=_exclusions(columns, tokens_r, supervised_r, max_prompt_tokens),
            max_prompt_tokens=max_prompt_tokens,
        )
        _write(folder, plan, table, first, groups)
        return plan


def load_plan(store_root: Path, dataset_id: str) -> Plan:
    """The kept plan. Raises InputError when there is none or it is not readable."""
    path = plan_folder(store_root, dataset_id) / PLAN_FILE
    try:
        return Plan.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise InputError(
            f"no plan of dataset {dataset_id[:12]} in {store_root}: expected {path}; make it with `drafter-data plan`",
            reason="plan-missing",
        ) from error
    except ValidationError as error:
        raise InputError(
            f"{path} is no plan: {error.errors()[0]['msg']}; remove the folder {path.parent} and plan again", reason="plan-invalid"
        ) from error


def chunk_rows(store_root: Path, dataset_id: str, chunk_index: int) -> list[PlannedSample]:
    """The samples of one chunk in the order in which they are sent; reads one row group. Raises InputError."""
    plan = load_plan(store_root, dataset_id)
    path = plan_folder(store_root, dataset_id) / SAMPLES_FILE
    if not 0 <= chunk_index < len(plan.chunks):
        raise InputError(
            f"plan {path.parent}: no chunk {chunk_index}; it has chunks 0..{len(plan.chunks) - 1}", reason="chunk-missing"
        )
    with pq.ParquetFile(path) as file:
        table = file.read_row_group(chunk_index)
    columns = (table.column(name).to_pylist() for name in ("row", "state_key", "num_tokens"))
    samples = (PlannedSample(*values) for values in zip(*columns, strict=True))
    return [sample for sample in samples if sample.num_tokens <= plan.max_prompt_tokens]


def neighbours_differ(tokens_n: NDArray[Any]) -> Rows:
    """An order in which requests that are in flight together differ in length as far as possible.

    Sorted by length, then taken at a stride at which any 16 consecutive ones lie as many ranks apart as can be (about n / 36):
    equal lengths meet only where more samples than that share one length.
    """
    count = len(tokens_n)
    return np.argsort(tokens_n, kind="stable")[np.arange(count) * _stride(count) % max(count, 1)]


@lru_cache(maxsize=4096)
def _stride(count: int) -> int:
    """The stride, coprime to `count`, whose first 15 multiples stay farthest from 0 modulo `count`."""
    strides = np.arange(1, max(count // 2, 1) + 1)
    strides = strides[np.gcd(strides, max(count, 1)) == 1]
    multiples = strides[:, None] * np.arange(1, min(APART, max(count, 2)))[None, :] % max(count, 1)
    return int(strides[np.minimum(multiples, count - multiples).min(axis=1).argmax()])


def _first_rows(columns: pa.Table, usable_r: NDArray[np.bool_]) -> tuple[Rows, list[str]]:
    """The first usable row of each distinct state, in row order, and the state keys."""
    usable = np.flatnonzero(usable_r)
    encoded = columns.column("state_key").take(pa.array(usable)).combine_chunks().dictionary_encode()
    _, first = np.unique(encoded.indices.to_numpy(), return_index=True)
    return usable[first], encoded.dictionary.to_pylist()


def _exclusions(
    columns: pa.Table, tokens_r: NDArray[Any], supervised_r: NDArray[Any], max_prompt_tokens: int
) -> tuple[Exclusion, ...]:
    """Rows that are known before sending not to make it."""
    rows = np.flatnonzero((tokens_r > max_prompt_tokens) | (supervised_r == 0))
    picked = columns.select(["sample_key", "state_key"]).take(pa.array(rows))
    keys = zip(picked.column("sample_key").to_pylist(), picked.column("state_key").to_pylist(), strict=True)
    found: list[Exclusion] = []
    for row, (sample, state) in zip(rows, keys, strict=True):
        over = tokens_r[row] > max_prompt_tokens
        detail = f"{tokens_r[row]} tokens, the engine takes {max_prompt_tokens}" if over else f"{tokens_r[row]} tokens"
        reason = "over-long" if over else "no-supervised-token"
        found.append(Exclusion(sample_key=sample, state_key=state, kind="excluded", reason=reason, detail=detail))
    return tuple(found)


def _chunks_of(
    columns: pa.Table, tokens_r: NDArray[Any], rows: Rows, costs: CostModel, chunk_samples: int, first: int
) -> tuple[list[Chunk], list[pa.Table]]:
    """Chunks over the given rows, numbered from `first`, and the table of each."""
    keys = columns.column("state_key").take(pa.array(rows)).to_pylist()
    tokens_n = tokens_r[rows]
    cost_n = predicted_seconds(costs.fit(), tokens_n)
    chunks: list[Chunk] = []
    groups: list[pa.Table] = []
    for index, (start, end) in enumerate(_cut(cost_n, chunk_samples), start=first):
        order = start + neighbours_differ(tokens_n[start:end])
        chunks.append(
            Chunk(
                index=index,
                key=chunk_key(keys[start:end]),
                samples=end - start,
                tokens=int(tokens_n[start:end].sum()),
                predicted_seconds=float(cost_n[start:end].sum()),
            )
        )
        values = {
            "chunk": np.full(end - start, index, dtype=np.int32),
            "row": rows[order],
            "state_key": [keys[k] for k in order],
            "num_tokens": tokens_n[order].astype(np.int32),
        }
        groups.append(pa.table(values, schema=SAMPLES_SCHEMA))
    return chunks, groups


def _cut(cost_n: NDArray[np.float64], chunk_samples: int) -> list[tuple[int, int]]:
    """Bounds of runs of about equal cost and `chunk_samples` samples each; none is empty."""
    count = len(cost_n)
    if not count:
        return []
    chunks = max(1, round(count / chunk_samples))
    middle_n = np.cumsum(cost_n) - cost_n / 2
    inner = np.searchsorted(middle_n, np.arange(1, chunks) * (cost_n.sum() / chunks))
    bounds = np.unique(np.concatenate([[0], inner, [count]]))
    return [(int(a), int(b)) for a, b in pairwise(bounds)]


def _under_limit(kept: Plan, table: pa.Table, max_prompt_tokens: int) -> tuple[Chunk, ...]:
    """The kept chunks with their counts under another limit; index, key and predicted seconds stay."""
    if max_prompt_tokens == kept.max_prompt_tokens:
        return kept.chunks
    chunk_n, tokens_n = table.column("chunk").to_numpy(), table.column("num_tokens").to_numpy().astype(np.int64)
    fits_n = tokens_n <= max_prompt_tokens
    samples = np.bincount(chunk_n[fits_n], minlength=len(kept.chunks))
    tokens = np.bincount(chunk_n[fits_n], weights=tokens_n[fits_n], minlength=len(kept.chunks))
    return tuple(
        chunk.model_copy(update={"samples": int(samples[chunk.index]), "tokens": int(tokens[chunk.index])}) for chunk in kept.chunks
    )


def _read_samples(folder: Path) -> pa.Table:
    path = folder / SAMPLES_FILE
    try:
        return pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(
            f"{path} cannot be read: {error}; remove the folder {folder} and plan again", reason="plan-invalid"
        ) from error


def _write(folder: Path, plan: Plan, kept: pa.Table, kept_chunks: int, groups: list[pa.Table]) -> None:
    """The samples first (a longer table serves the old plan.json as well), the plan last."""
    if groups or not kept_chunks:
        with atomic_path(folder / SAMPLES_FILE) as temporary, pq.ParquetWriter(temporary, SAMPLES_SCHEMA) as writer:
            bounds = np.searchsorted(kept.column("chunk").to_numpy(), np.arange(kept_chunks + 1))
            for start, end in pairwise(bounds):
                writer.write_table(kept.slice(start, end - start), row_group_size=max(1, int(end - start)))
            for group in groups:
                writer.write_table(group, row_group_size=group.num_rows)
    write_atomic(folder / PLAN_FILE, plan.model_dump_json(indent=1))


@contextmanager
def _planning_lock(folder: Path) -> Generator[None]:
    """One planner a dataset and store: two would cut differently once their costs differ."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
