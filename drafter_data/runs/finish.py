"""The last step of a merge: one range of sample keys after the other is sorted, de-duplicated and written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from data_contracts.identity import new_dataset_digest
from drafter_data.dataset import DATASET_SCHEMA
from drafter_data.runs.spill import SPILL_SCHEMA, partition_name
from drafter_data.runs.units import Unit

GROUP_TOKENS: Final = 1 << 20
"""A row group ends before the row that would bring it above this many tokens (one row may be longer)."""


@dataclass(slots=True)
class RunCounts:
    """What stayed of one run, and what was repeated."""

    kept: int = 0
    repeats: int = 0
    kept_tokens: int = 0
    supervised_tokens: int = 0


@dataclass(slots=True)
class Written:
    """What the rows file holds."""

    runs: dict[int, RunCounts]
    longest_tokens: int = 0
    key_digest: Any = field(default_factory=new_dataset_digest)
    state_heads: list[NDArray[np.uint64]] = field(default_factory=list[NDArray[np.uint64]])


class RowsWriter:
    """Writes rows in key order, in row groups that depend on the rows alone, never on how the work was cut."""

    def __init__(self, path: Path) -> None:
        options: dict[str, Any] = {"use_dictionary": ["run"], "write_statistics": ["sample_key", "num_tokens"]}
        self._writer = pq.ParquetWriter(path, DATASET_SCHEMA, compression="zstd", compression_level=1, **options)
        self._held: list[pa.Table] = []
        self._held_tokens = 0

    def write(self, rows: pa.Table) -> None:
        """Takes rows that follow those before in key order."""
        tokens = rows.column("num_tokens").to_numpy()
        start = 0
        for position, count in enumerate(tokens):
            if self._held_tokens and self._held_tokens + count > GROUP_TOKENS:
                self._held.append(rows.slice(start, position - start))
                self._end_group()
                start = position
            self._held_tokens += int(count)
        self._held.append(rows.slice(start))

    def _end_group(self) -> None:
        group = pa.concat_tables(self._held).combine_chunks()
        if group.num_rows:
            self._writer.write_table(group, row_group_size=group.num_rows)
        self._held, self._held_tokens = [], 0

    def close(self) -> None:
        """Writes the last group and the footer."""
        if self._held:
            self._end_group()
        self._writer.close()


def write_rows(
    folder: Path, path: Path, partitions: int, units: Sequence[Unit], lines_before: Sequence[int], run_names: Sequence[str]
) -> Written:
    """Writes all spilled rows to `path`. `lines_before[u]` is the number of lines in the file before unit u."""
    written = Written({run: RunCounts() for run in range(len(run_names))})
    run_of_unit = np.array([unit.run for unit in units], dtype=np.int32)
    writer = RowsWriter(path)
    for partition in range(partitions):
        rows = _read_partition(folder, partition)
        if rows.num_rows:
            writer.write(_finished(rows, units, run_of_unit, lines_before, run_names, written))
    writer.close()
    return written


def _read_partition(folder: Path, partition: int) -> pa.Table:
    tables = [SPILL_SCHEMA.empty_table()]
    for path in sorted(folder.glob(f"*-{partition_name(partition)}")):
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
            tables.append(reader.read_all())
    return pa.concat_tables(tables).combine_chunks()


def _finished(
    rows: pa.Table,
    units: Sequence[Unit],
    run_of_unit: NDArray[np.int32],
    lines_before: Sequence[int],
    run_names: Sequence[str],
    written: Written,
) -> pa.Table:
    unit = rows.column("unit").to_numpy()
    keys = _keys(rows.column("sample_key"))
    order = np.lexsort((rows.column("line").to_numpy(), unit, keys["c"], keys["b"], keys["a"]))
    ordered = keys[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = ordered[1:] != ordered[:-1]
    runs = run_of_unit[unit]
    for run, times in Counter(runs[order[~first]].tolist()).items():
        written.runs[run].repeats += times
    kept = rows.take(pa.array(order[first]))
    return _with_contract_columns(kept, units, runs[order[first]], lines_before, run_names, written)


def _with_contract_columns(
    kept: pa.Table,
    units: Sequence[Unit],
    runs: NDArray[np.int32],
    lines_before: Sequence[int],
    run_names: Sequence[str],
    written: Written,
) -> pa.Table:
    ids, masks = kept.column("input_ids").combine_chunks(), kept.column("loss_mask").combine_chunks()
    lengths = np.diff(ids.offsets.to_numpy()).astype(np.int32)
    starts = masks.offsets.to_numpy()[:-1]
    values = masks.values.to_numpy(zero_copy_only=False)
    supervised = np.add.reduceat(values.astype(np.int32), starts).astype(np.int32)
    for run in np.unique(runs):
        of_run, counts = runs == run, written.runs[int(run)]
        counts.kept += int(of_run.sum())
        counts.kept_tokens += int(lengths[of_run].sum())
        counts.supervised_tokens += int(supervised[of_run].sum())
    written.longest_tokens = max(written.longest_tokens, int(lengths.max()))
    keys = _keys(kept.column("sample_key"))
    written.key_digest.update(keys.tobytes())
    states = _keys(kept.column("state_key"))
    written.state_heads.append(states["a"].astype(np.uint64))
    columns = {
        "sample_key": pa.array(_hex(kept.column("sample_key"))),
        "state_key": pa.array(_hex(kept.column("state_key"))),
        "run": pa.array([run_names[run] for run in runs]),
        "source_id": pa.array(list(_source_ids(kept, units, lines_before)), pa.string()),
        "input_ids": ids,
        "loss_mask": masks,
        "num_tokens": pa.array(lengths),
        "num_supervised": pa.array(supervised),
    }
    return pa.table({name: column.cast(DATASET_SCHEMA.field(name).type) for name, column in columns.items()}, schema=DATASET_SCHEMA)


def _source_ids(kept: pa.Table, units: Sequence[Unit], lines_before: Sequence[int]) -> Iterator[str]:
    """The run's own id of each row, else `file:line`."""
    given = kept.column("source_id").to_pylist()
    for source_id, unit, line in zip(given, kept.column("unit").to_pylist(), kept.column("line").to_pylist(), strict=True):
        yield source_id if source_id is not None else f"{units[unit].file.name}:{lines_before[unit] + line}"


_KEY: Final = np.dtype([("a", ">u8"), ("b", ">u8"), ("c", ">u4")])


def _keys(column: Any) -> NDArray[np.void]:
    chunk = column.combine_chunks()
    data = np.frombuffer(chunk.buffers()[1], dtype=_KEY)
    return data[chunk.offset : chunk.offset + len(chunk)]


def _hex(column: Any) -> list[str]:
    return [key.hex() for key in column.to_pylist()]
