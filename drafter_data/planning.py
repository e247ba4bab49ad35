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

from collections.abc import Callable, Generator, Iterator
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

from data_contracts.identity import KEY_HEX_DIGITS, chunk_key
from data_contracts.plan import PLAN_FILE, SAMPLE_COLUMNS, SAMPLES_FILE, Chunk, Exclusion, Plan
from drafter_data.costs import CostModel, predicted_seconds
from drafter_data.dataset import Dataset, arrow_schema
from drafter_data.errors import InputError
from drafter_data.files import atomic_path, exclusive, write_atomic
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

    Memory: about 28 bytes a row and what sorting them takes (no ids, no masks). Raises InputError when a kept plan cannot be read.
    """
    folder = plan_folder(store.root, dataset.record.dataset_id)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive(folder / ".lock"):  # two planners would cut differently once their costs differ
            return _made_or_kept(dataset, store, costs, folder, chunk_samples, max_prompt_tokens)
    except OSError as error:
        raise InputError(
            f"cannot keep a plan in {folder}: {error.strerror}; make the store writable, with space for the plan",
            reason="store-not-writable",
        ) from error


def _made_or_kept(
    dataset: Dataset, store: Store, costs: CostModel, folder: Path, chunk_samples: int, max_prompt_tokens: int
) -> Plan:
    columns = _read_columns(dataset)
    kept = load_plan(store.root, dataset.record.dataset_id) if (folder / PLAN_FILE).is_file() else None
    planned = _read_planned(folder) if kept is not None else None
    rows = columns.first_rows(max_prompt_tokens)
    new_rows = rows if planned is None else rows[~np.isin(rows, planned.rows)]
    new_rows = new_rows[np.fromiter((columns.key(int(row)) not in store for row in new_rows), bool, len(new_rows))]
    if kept is not None and not len(new_rows) and kept.max_prompt_tokens == max_prompt_tokens:
        return kept
    old_chunks = _under_limit(kept, planned, max_prompt_tokens) if kept is not None and planned is not None else ()
    with _samples_file(folder, len(old_chunks), rewrite=kept is None or len(new_rows) > 0) as write:
        chunks = _write_chunks(write, columns, new_rows, costs, chunk_samples, len(old_chunks))
    plan = Plan(
        dataset_id=dataset.record.dataset_id,
        chunks=(*old_chunks, *chunks),
        already_stored=kept.already_stored if kept is not None else len(rows) - len(new_rows),
        excluded=_exclusions(dataset, columns, max_prompt_tokens),
        max_prompt_tokens=max_prompt_tokens,
    )
    write_atomic(folder / PLAN_FILE, plan.model_dump_json(indent=1))
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


@dataclass(frozen=True)
class MissingSamples:
    """What the store lacks of a plan: chunk index and tokens of each such sample."""

    chunk_n: NDArray[np.int32]
    tokens_n: NDArray[np.int32]


def missing_samples(store: Store, plan: Plan) -> MissingSamples:
    """Compares the whole plan with the store in one pass, a chunk at a time (the store as last refreshed)."""
    chunks, tokens = list[NDArray[np.int32]](), list[NDArray[np.int32]]()
    path = plan_folder(store.root, plan.dataset_id) / SAMPLES_FILE
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(65_536, columns=["chunk", "state_key", "num_tokens"]):
            tokens_b = batch.column("num_tokens").to_numpy()
            stored = [key in store for key in batch.column("state_key").to_pylist()]
            lacking = ~np.array(stored, dtype=bool) & (tokens_b <= plan.max_prompt_tokens)
            chunks.append(batch.column("chunk").to_numpy()[lacking])
            tokens.append(tokens_b[lacking])
    none = np.empty(0, dtype=np.int32)
    return MissingSamples(np.concatenate([none, *chunks]), np.concatenate([none, *tokens]))


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


@dataclass(frozen=True)
class _Columns:
    """What planning needs of the dataset, 28 bytes a row: state keys [R, 20], tokens and supervised tokens [R]."""

    keys_rk: NDArray[np.uint8]
    tokens_r: NDArray[np.int32]
    supervised_r: NDArray[np.int32]

    def first_rows(self, max_prompt_tokens: int) -> Rows:
        """The first usable row of each distinct state, ascending."""
        usable = np.flatnonzero((self.tokens_r <= max_prompt_tokens) & (self.supervised_r > 0))
        words_wr = self.keys_rk[usable].view(np.uint32).T
        order = np.lexsort(words_wr)  # stable: equal keys stay in row order
        same = np.ones(max(len(order) - 1, 0), dtype=bool)
        for word_r in words_wr:
            same &= word_r[order[1:]] == word_r[order[:-1]]
        first = order[np.concatenate([[True], ~same])] if len(order) else order
        return usable[np.sort(first)]

    def key(self, row: int) -> str:
        """The state key of a row."""
        return self.keys_rk[row].tobytes().hex()


@dataclass(frozen=True)
class _Planned:
    """What a kept plan brings: chunk, dataset row and tokens of each sample. A state is always planned by its first usable row."""

    chunks: NDArray[np.int32]
    rows: Rows
    tokens: NDArray[np.int32]


def _read_columns(dataset: Dataset) -> _Columns:
    """In batches, so that the file's pages are never in memory together."""
    with pq.ParquetFile(dataset.rows_path) as file:
        count = file.metadata.num_rows
        keys_rk = np.empty((count, KEY_HEX_DIGITS // 2), dtype=np.uint8)
        tokens_r, supervised_r = np.empty(count, dtype=np.int32), np.empty(count, dtype=np.int32)
        start = 0
        for batch in file.iter_batches(65_536, columns=["state_key", "num_tokens", "num_supervised"]):
            end = start + batch.num_rows
            keys = bytes.fromhex("".join(batch.column("state_key").to_pylist()))
            keys_rk[start:end] = np.frombuffer(keys, dtype=np.uint8).reshape(batch.num_rows, -1)
            tokens_r[start:end] = batch.column("num_tokens").to_numpy()
            supervised_r[start:end] = batch.column("num_supervised").to_numpy()
            start = end
    return _Columns(keys_rk, tokens_r, supervised_r)


def _read_planned(folder: Path) -> _Planned:
    path = folder / SAMPLES_FILE
    try:
        table = pq.read_table(path, columns=["chunk", "row", "num_tokens"])
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(
            f"{path} cannot be read: {error}; remove the folder {folder} and plan again", reason="plan-invalid"
        ) from error
    return _Planned(*(table.column(name).to_numpy() for name in ("chunk", "row", "num_tokens")))


def _exclusions(dataset: Dataset, columns: _Columns, max_prompt_tokens: int) -> tuple[Exclusion, ...]:
    """Rows that are known before sending not to make it."""
    rows = np.flatnonzero((columns.tokens_r > max_prompt_tokens) | (columns.supervised_r == 0))
    if not len(rows):
        return ()
    found: list[Exclusion] = []
    for row, sample_key in zip(rows, _sample_keys(dataset, rows), strict=True):
        tokens = int(columns.tokens_r[row])
        over = tokens > max_prompt_tokens
        found.append(
            Exclusion(
                sample_key=sample_key,
                state_key=columns.key(int(row)),
                kind="excluded",
                reason="over-long" if over else "no-supervised-token",
                detail=f"{tokens} tokens, the engine takes {max_prompt_tokens}" if over else f"{tokens} tokens",
            )
        )
    return tuple(found)


def _sample_keys(dataset: Dataset, rows: Rows) -> Iterator[str]:
    """The sample keys of some rows (ascending), in batches."""
    start = 0
    with pq.ParquetFile(dataset.rows_path) as file:
        for batch in file.iter_batches(65_536, columns=["sample_key"]):
            first, last = np.searchsorted(rows, [start, start + batch.num_rows])
            yield from batch.column("sample_key").take(pa.array(rows[first:last] - start)).to_pylist()
            start += batch.num_rows


def _write_chunks(
    write: Callable[[pa.Table], None], columns: _Columns, rows: Rows, costs: CostModel, chunk_samples: int, first: int
) -> list[Chunk]:
    """Cuts the given rows into chunks, numbered from `first`, and writes the table of each."""
    cost_n = predicted_seconds(costs.fit(), columns.tokens_r[rows])
    chunks: list[Chunk] = []
    for index, (start, end) in enumerate(_cut(cost_n, chunk_samples), start=first):
        ordered = rows[start:end][neighbours_differ(columns.tokens_r[rows[start:end]])]
        state_keys = [columns.key(int(row)) for row in ordered]
        tokens_n = columns.tokens_r[ordered]
        chunks.append(
            Chunk(
                index=index,
                key=chunk_key(state_keys),
                samples=end - start,
                tokens=int(tokens_n.sum(dtype=np.int64)),
                predicted_seconds=float(cost_n[start:end].sum()),
            )
        )
        values = {
            "chunk": np.full(end - start, index, dtype=np.int32),
            "row": ordered,
            "state_key": state_keys,
            "num_tokens": tokens_n,
        }
        write(pa.table(values, schema=SAMPLES_SCHEMA))
    return chunks


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


def _under_limit(kept: Plan, planned: _Planned, max_prompt_tokens: int) -> tuple[Chunk, ...]:
    """The kept chunks with their counts under another limit; index, key and predicted seconds stay."""
    if max_prompt_tokens == kept.max_prompt_tokens:
        return kept.chunks
    fits = planned.tokens <= max_prompt_tokens
    samples = np.bincount(planned.chunks[fits], minlength=len(kept.chunks))
    tokens = np.bincount(planned.chunks[fits], weights=planned.tokens[fits], minlength=len(kept.chunks))
    return tuple(
        chunk.model_copy(update={"samples": int(samples[chunk.index]), "tokens": int(tokens[chunk.index])}) for chunk in kept.chunks
    )


@contextmanager
def _samples_file(folder: Path, kept_chunks: int, *, rewrite: bool) -> Generator[Callable[[pa.Table], None]]:
    """Copies the kept chunks and yields what writes a further one. plan.json comes later: the old one can use the new file too."""

    def write_group(table: pa.Table) -> None:
        writer.write_table(table, row_group_size=max(1, table.num_rows))

    path = folder / SAMPLES_FILE
    if not rewrite:
        yield write_group
        return
    with atomic_path(path) as temporary, pq.ParquetWriter(temporary, SAMPLES_SCHEMA) as writer:
        if kept_chunks:
            with pq.ParquetFile(path) as old:
                for chunk in range(kept_chunks):
                    write_group(old.read_row_group(chunk))
        yield write_group
