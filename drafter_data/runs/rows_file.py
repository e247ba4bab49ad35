"""Writing rows.parquet: in key order, in row groups that depend on the rows alone, never on how the work was cut."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from drafter_data.dataset import DATASET_SCHEMA

GROUP_TOKENS: Final = 1 << 20
"""A row group ends before the row that would bring it above this many tokens (one row may be longer)."""
GROUP_ROWS: Final = 1 << 16
_QUEUED_GROUPS: Final = 4


class RowsFile:
    """Encodes and writes in a thread of its own (Arrow lets go of the interpreter's lock), while the next rows are sorted."""

    def __init__(self, path: Path) -> None:
        options: dict[str, Any] = {"use_dictionary": ["run"], "write_statistics": ["sample_key", "num_tokens"]}
        self._writer = pq.ParquetWriter(path, DATASET_SCHEMA, compression="zstd", compression_level=1, **options)
        self._held: list[pa.Table] = []
        self._held_tokens = self._held_rows = 0
        self._groups: queue.Queue[pa.Table | None] = queue.Queue(_QUEUED_GROUPS)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._write_groups, name="rows-file", daemon=True)
        self._thread.start()

    def write(self, rows: pa.Table) -> None:
        """Takes rows that follow those before in key order."""
        ends = np.cumsum(rows.column("num_tokens").to_numpy().astype(np.int64))
        start = 0
        while start < rows.num_rows:
            before = int(ends[start - 1]) if start else 0
            fitting = int(np.searchsorted(ends, before + GROUP_TOKENS - self._held_tokens, side="right"))
            stop = min(fitting, start + GROUP_ROWS - self._held_rows)
            if stop == start and not self._held_rows:
                stop = start + 1  # a row longer than a group is a group of its own
            if stop > start:
                self._held.append(rows.slice(start, stop - start))
                self._held_tokens += int(ends[stop - 1]) - before
                self._held_rows += stop - start
            if stop < rows.num_rows:
                self._end_group()
            start = stop

    def close(self) -> None:
        """Writes the last group and the footer. Raises what the writing thread has met."""
        if self._held_rows:
            self._end_group()
        self._groups.put(None)
        self._thread.join()
        self._raise()
        self._writer.close()

    def _end_group(self) -> None:
        self._raise()
        self._groups.put(pa.concat_tables(self._held).combine_chunks())
        self._held, self._held_tokens, self._held_rows = [], 0, 0

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _write_groups(self) -> None:
        while (group := self._groups.get()) is not None:
            if self._failure is not None:
                continue  # the other side learns of it at its next group
            try:
                self._writer.write_table(group, row_group_size=group.num_rows)
            except (OSError, pa.ArrowException) as error:
                self._failure = error
