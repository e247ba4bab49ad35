"""Rows on their way: what a worker has tokenised, written to disk by range of sample key.

Each worker appends to one uncompressed Arrow stream a partition. A partition holds one range of sample keys, so that the
last step can sort and de-duplicate one partition at a time, in bounded memory, and still write all rows in key order.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data_contracts.identity import state_key_of_bytes
from drafter_data.dataset import DATASET_SCHEMA

SPILL_SCHEMA: Final = pa.schema(
    [
        ("sample_key", pa.binary(20)),
        ("state_key", pa.binary(20)),
        ("unit", pa.int32()),
        ("line", pa.int64()),
        ("num_tokens", pa.int32()),
        ("num_supervised", pa.int32()),
        ("source_id", pa.string()),
        ("input_ids", DATASET_SCHEMA.field("input_ids").type),  # as they are written in the end: a cast would copy them
        ("loss_mask", DATASET_SCHEMA.field("loss_mask").type),
    ]
)
"""`unit` is the piece of a file that the row comes from; `line` counts within that piece."""
KEY_DTYPE: Final = np.dtype([("a", ">u8"), ("b", ">u8"), ("c", ">u4")])
"""A key's 20 bytes as numbers that sort as the bytes do."""
_FLUSH_BYTES: Final = 24 << 20
_ROW_OVERHEAD_BYTES: Final = 500


@dataclass(slots=True)
class _Row:
    sample_key: bytes
    state_key: bytes
    unit: int
    line: int
    num_supervised: int
    source_id: str | None
    ids_s: NDArray[np.int32]
    mask_s: NDArray[np.uint8]


class Spill:
    """One worker's rows. Memory is bounded by `_FLUSH_BYTES` whatever comes in. With `keys_only`, ids and masks are left out."""

    def __init__(self, folder: Path, partitions: int, *, keys_only: bool = False) -> None:
        self._folder = folder
        self._partitions = partitions
        self._keys_only = keys_only
        self._writers: dict[int, pa.RecordBatchStreamWriter] = {}
        self._rows: list[_Row] = []
        self._held_bytes = 0

    def add(self, unit: int, line: int, source_id: str | None, ids_s: NDArray[np.int32], mask_s: NDArray[np.uint8]) -> None:
        """Takes one row over; its keys are computed here."""
        state = bytes.fromhex(state_key_of_bytes(ids_s.astype("<u4", copy=False).tobytes()))
        sample = hashlib.blake2b(state + mask_s.tobytes(), digest_size=20).digest()
        self._rows.append(_Row(sample, state, unit, line, int(np.count_nonzero(mask_s)), source_id, ids_s, mask_s))
        self._held_bytes += ids_s.nbytes + mask_s.nbytes + _ROW_OVERHEAD_BYTES
        if self._held_bytes >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what is held to the partitions' files, so that nothing is left in this process."""
        by_partition: dict[int, list[_Row]] = {}
        for row in self._rows:
            by_partition.setdefault(int.from_bytes(row.sample_key[:2], "big") * self._partitions >> 16, []).append(row)
        for partition, rows in by_partition.items():
            self._write(partition, rows)
        self._rows, self._held_bytes = [], 0

    def _write(self, partition: int, rows: list[_Row]) -> None:
        lengths = [len(row.ids_s) for row in rows]
        held = rows[:0] if self._keys_only else rows
        batch = pa.record_batch(
            [
                _keys(b"".join(row.sample_key for row in rows)),
                _keys(b"".join(row.state_key for row in rows)),
                pa.array([row.unit for row in rows], pa.int32()),
                pa.array([row.line for row in rows], pa.int64()),
                pa.array(lengths, pa.int32()),
                pa.array([row.num_supervised for row in rows], pa.int32()),
                pa.array([row.source_id for row in rows], pa.string()),
                _lists([row.ids_s for row in held], len(rows), SPILL_SCHEMA.field("input_ids").type),
                _lists([row.mask_s for row in held], len(rows), SPILL_SCHEMA.field("loss_mask").type),
            ],
            schema=SPILL_SCHEMA,
        )
        writer = self._writers.get(partition)
        if writer is None:
            writer = pa.ipc.new_stream(str(self._folder / f"w{os.getpid()}-p{partition:04d}.arrows"), SPILL_SCHEMA)
            self._writers[partition] = writer
        writer.write_batch(batch)

    def close(self) -> None:
        """Ends the streams. A stream that is not ended reads to its last whole batch all the same."""
        self.flush()
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()


def read_partition(folder: Path, partition: int) -> pa.Table:
    """All rows of one partition, in no order. The files are mapped: only columns that are looked at take memory."""
    tables = [SPILL_SCHEMA.empty_table()]
    for path in sorted(folder.glob(f"w*-p{partition:04d}.arrows")):
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
            tables.append(reader.read_all())
    return pa.concat_tables(tables)


def keys_of(column: Any) -> NDArray[np.void]:
    """A key column as an array of KEY_DTYPE."""
    width = KEY_DTYPE.itemsize
    data = [
        np.frombuffer(chunk.buffers()[1], dtype=np.uint8)[chunk.offset * width : (chunk.offset + len(chunk)) * width]
        for chunk in column.chunks
        if len(chunk)
    ]
    joined = np.concatenate(data) if data else np.zeros(0, dtype=np.uint8)  # as bytes: joining records would swap their order
    return joined.view(KEY_DTYPE)


def take_rows(rows: pa.Table, order: NDArray[np.int64]) -> pa.Table:
    """`rows.take(order)`, but several times as fast on long lists: each row is one copy of memory."""
    columns: dict[str, Any] = {}
    for name in rows.schema.names:
        column = rows.column(name)
        if pa.types.is_list(column.type):
            lists = [row for chunk in column.chunks for row in _views(chunk)]
            columns[name] = _lists([lists[i] for i in order], len(order), column.type)
        else:
            columns[name] = column.take(pa.array(order))
    return pa.table(columns, schema=rows.schema).combine_chunks()


def _views(chunk: Any) -> list[NDArray[Any]]:
    values, offsets = chunk.values.to_numpy(), chunk.offsets.to_numpy().tolist()
    return [values[start:end] for start, end in pairwise(offsets)]


def _keys(joined: bytes) -> pa.Array:
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(20), len(joined) // 20, [None, pa.py_buffer(joined)])


def _lists(rows: list[Any], count: int, kind: pa.ListType) -> pa.ListArray:
    offsets = np.zeros(count + 1, dtype=np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1 : len(rows) + 1])
    values = np.concatenate(rows) if rows else []
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, kind.value_type), type=kind)
