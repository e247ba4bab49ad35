"""Rows on their way: what a worker has tokenised, written to disk by range of sample key.

Each worker appends to one uncompressed Arrow stream a partition. A partition holds one range of sample keys, so that the
last step can sort and de-duplicate one partition at a time, in bounded memory, and still write all rows in key order.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data_contracts.identity import state_key_of_bytes

SPILL_SCHEMA: Final = pa.schema(
    [
        ("sample_key", pa.binary(20)),
        ("state_key", pa.binary(20)),
        ("unit", pa.int32()),
        ("line", pa.int64()),
        ("source_id", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
    ]
)
"""`unit` is the piece of a file that the row comes from; `line` counts within that piece."""
_FLUSH_BYTES: Final = 24 << 20
_ROW_OVERHEAD_BYTES: Final = 400


def partition_name(partition: int) -> str:
    """File name of a worker's rows of one partition, without the worker's own prefix."""
    return f"p{partition:04d}.arrows"


class Spill:
    """One worker's rows. Memory is bounded by `_FLUSH_BYTES` whatever comes in."""

    def __init__(self, folder: Path, partitions: int) -> None:
        self._folder = folder
        self._partitions = partitions
        self._prefix = f"w{os.getpid()}-"
        self._writers: dict[int, pa.RecordBatchStreamWriter] = {}
        self._clear()

    def _clear(self) -> None:
        self._keys: list[tuple[bytes, bytes]] = []
        self._units: list[int] = []
        self._lines: list[int] = []
        self._source_ids: list[str | None] = []
        self._ids: list[NDArray[np.int32]] = []
        self._masks: list[NDArray[np.uint8]] = []
        self._held_bytes = 0

    def add(self, unit: int, line: int, source_id: str | None, ids_s: NDArray[np.int32], mask_s: NDArray[np.uint8]) -> None:
        """Takes one row over; its keys are computed here."""
        state = bytes.fromhex(state_key_of_bytes(ids_s.astype("<u4", copy=False).tobytes()))
        self._keys.append((hashlib.blake2b(state + mask_s.tobytes(), digest_size=20).digest(), state))
        self._units.append(unit)
        self._lines.append(line)
        self._source_ids.append(source_id)
        self._ids.append(ids_s)
        self._masks.append(mask_s)
        self._held_bytes += ids_s.nbytes + mask_s.nbytes + _ROW_OVERHEAD_BYTES
        if self._held_bytes >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what is held to the partitions' files."""
        if not self._keys:
            return
        heads = np.array([int.from_bytes(sample[:2], "big") for sample, _ in self._keys], dtype=np.int64)
        partition_of = heads * self._partitions >> 16
        for partition in np.unique(partition_of):
            self._write(int(partition), np.flatnonzero(partition_of == partition))
        self._clear()

    def _write(self, partition: int, rows: NDArray[np.int64]) -> None:
        batch = pa.record_batch(
            [
                pa.array([self._keys[i][0] for i in rows], pa.binary(20)),
                pa.array([self._keys[i][1] for i in rows], pa.binary(20)),
                pa.array([self._units[i] for i in rows], pa.int32()),
                pa.array([self._lines[i] for i in rows], pa.int64()),
                pa.array([self._source_ids[i] for i in rows], pa.string()),
                _lists([self._ids[i] for i in rows], pa.int32()),
                _lists([self._masks[i] for i in rows], pa.uint8()),
            ],
            schema=SPILL_SCHEMA,
        )
        writer = self._writers.get(partition)
        if writer is None:
            writer = pa.ipc.new_stream(str(self._folder / (self._prefix + partition_name(partition))), SPILL_SCHEMA)
            self._writers[partition] = writer
        writer.write_batch(batch)

    def close(self) -> None:
        """Writes the rest and ends the streams."""
        self.flush()
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()


def _lists(rows: list[NDArray[np.int32]] | list[NDArray[np.uint8]], kind: pa.DataType) -> pa.ListArray:
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(rows), kind))
