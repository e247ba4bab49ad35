"""The last step of a merge: one range of sample keys after the other is sorted, de-duplicated and written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from data_contracts.identity import new_dataset_digest
from drafter_data.dataset import DATASET_SCHEMA
from drafter_data.runs.options import MergeOptions
from drafter_data.runs.rows_file import RowsFile
from drafter_data.runs.selection import Conflicts, choose_sample, find_conflicts, order_partition
from drafter_data.runs.spill import keys_of, read_partition, take_rows
from drafter_data.runs.units import Unit


@dataclass(slots=True)
class RunCounts:
    """What stayed of one run, and what did not for another row's sake."""

    kept: int = 0
    repeats: int = 0
    not_sampled: int = 0
    kept_tokens: int = 0
    supervised_tokens: int = 0


@dataclass(slots=True)
class Finished:
    """What the rows file holds."""

    runs: list[RunCounts]
    longest_tokens: int = 0
    distinct_states: int = 0
    dataset_id: str = ""
    conflicts: Conflicts = field(default_factory=lambda: Conflicts(frozenset(), {}))


class Finisher:
    """`lines_before[u]` is the number of lines that the pieces before unit u of the same file have."""

    def __init__(
        self, folder: Path, partitions: int, units: Sequence[Unit], lines_before: Sequence[int], run_names: Sequence[str]
    ) -> None:
        self._folder = folder
        self._partitions = partitions
        self._units = units
        self._lines_before = lines_before
        self._run_names = run_names
        self._run_of_unit = np.array([unit.run for unit in units], dtype=np.int32)
        self._digest = new_dataset_digest()
        self._states: list[NDArray[np.uint64]] = []
        self._with_id: list[tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.int32]]] = []
        self._finished = Finished([RunCounts() for _ in run_names])

    def finish(self, path: Path | None, options: MergeOptions) -> Finished:
        """Writes all rows to `path`, or only counts them where it is None."""
        sampled = choose_sample(self._folder, self._partitions, options)
        file = RowsFile(path) if path is not None else None
        for partition in range(self._partitions):
            rows = read_partition(self._folder, partition)
            if rows.num_rows:
                kept, runs = self._select(rows, None if sampled is None else sampled[partition])
                if file is not None and kept.num_rows:
                    file.write(self._with_contract_columns(kept, runs))
        if file is not None:
            file.close()
        self._finished.dataset_id = self._digest.hexdigest()
        self._finished.distinct_states = len(np.unique(np.concatenate([np.zeros(0, np.uint64), *self._states])))
        self._finished.conflicts = find_conflicts(*([list(column) for column in zip(*self._with_id, strict=True)] or [[], [], []]))
        return self._finished

    def _select(self, rows: pa.Table, sampled: NDArray[np.bool_] | None) -> tuple[pa.Table, NDArray[np.int32]]:
        """The rows that stay, in key order, with their run numbers; the others are counted."""
        ordering = order_partition(rows)
        run_of_row = self._run_of_unit[rows.column("unit").to_numpy()]
        distinct = ordering.order[ordering.first]
        self._count("repeats", run_of_row[ordering.order[~ordering.first]])
        if sampled is not None:
            self._count("not_sampled", run_of_row[distinct[~sampled]])
            distinct = distinct[sampled]
        kept = take_rows(rows, distinct)
        self._tally(kept, run_of_row[distinct])
        return kept, run_of_row[distinct]

    def _count(self, what: str, runs: NDArray[np.int32], weights: NDArray[np.int32] | None = None) -> None:
        totals = np.bincount(runs, weights=weights, minlength=len(self._run_names)).astype(np.int64)
        for counts, total in zip(self._finished.runs, totals.tolist(), strict=True):
            setattr(counts, what, getattr(counts, what) + total)

    def _tally(self, kept: pa.Table, runs: NDArray[np.int32]) -> None:
        lengths = kept.column("num_tokens").to_numpy()
        self._count("kept", runs)
        self._count("kept_tokens", runs, lengths)
        self._count("supervised_tokens", runs, kept.column("num_supervised").to_numpy())
        self._finished.longest_tokens = max(self._finished.longest_tokens, int(lengths.max(initial=0)))
        keys = keys_of(kept.column("sample_key"))
        self._digest.update(keys.tobytes())
        self._states.append(keys_of(kept.column("state_key"))["a"].astype(np.uint64))
        source_ids = kept.column("source_id").to_pylist()
        given = np.array([position for position, source_id in enumerate(source_ids) if source_id is not None], dtype=np.int64)
        if len(given):
            hashes = np.array([id_hash(source_ids[position]) for position in given], dtype=np.uint64)
            self._with_id.append((hashes, keys["a"].astype(np.uint64)[given], runs[given]))

    def _with_contract_columns(self, kept: pa.Table, runs: NDArray[np.int32]) -> pa.Table:
        columns: dict[str, Any] = {
            "sample_key": pa.array([key.hex() for key in kept.column("sample_key").to_pylist()]),
            "state_key": pa.array([key.hex() for key in kept.column("state_key").to_pylist()]),
            "run": pa.array([self._run_names[run] for run in runs]),
            "source_id": pa.array(list(self._source_ids(kept)), pa.string()),
            **{name: kept.column(name).combine_chunks() for name in ("input_ids", "loss_mask", "num_tokens", "num_supervised")},
        }
        cast = {name: column.cast(DATASET_SCHEMA.field(name).type) for name, column in columns.items()}
        return pa.table(cast, schema=DATASET_SCHEMA)

    def _source_ids(self, kept: pa.Table) -> Iterator[str]:
        """The run's own id of each row, else `file:line`."""
        columns = (kept.column(name).to_pylist() for name in ("source_id", "unit", "line"))
        for source_id, unit, line in zip(*columns, strict=True):
            yield source_id if source_id is not None else f"{self._units[unit].file.name}:{self._lines_before[unit] + line}"


def id_hash(source_id: str) -> int:
    """What a source id is remembered by: 64 bits, so that millions of them fit in memory."""
    return xxhash.xxh3_64_intdigest(source_id.encode())
