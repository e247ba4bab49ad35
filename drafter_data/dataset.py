"""Opening and reading a finished dataset (data_contracts/dataset.py says what the folder holds)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import ValidationError

from data_contracts.dataset import COLUMNS, RECORD_FILE, ROWS_FILE, DatasetRecord
from drafter_data.errors import InputError

_ARROW_TYPES = {
    "string": pa.string(),
    "list<int32>": pa.list_(pa.field("element", pa.int32(), nullable=False)),
    "list<uint8>": pa.list_(pa.field("element", pa.uint8(), nullable=False)),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "uint8": pa.uint8(),
}


def arrow_schema(columns: dict[str, str]) -> pa.Schema:
    """The Arrow schema of a contract's column table; no column is nullable."""
    return pa.schema([pa.field(name, _ARROW_TYPES[kind], nullable=False) for name, kind in columns.items()])


DATASET_SCHEMA = arrow_schema(COLUMNS)


@dataclass(frozen=True)
class Sample:
    """One dataset row. `input_ids_s` int32 [S], `loss_mask_s` uint8 [S] with 1 on supervised tokens."""

    row: int
    sample_key: str
    state_key: str
    run: str
    source_id: str
    input_ids_s: NDArray[np.int32]
    loss_mask_s: NDArray[np.uint8]

    @property
    def tokens(self) -> int:
        """Prompt length."""
        return len(self.input_ids_s)


class Dataset:
    """A finished dataset version, read lazily: memory is bounded by one row group."""

    def __init__(self, folder: Path, record: DatasetRecord) -> None:
        self.folder = folder
        self.record = record

    @classmethod
    def open(cls, folder: Path) -> Dataset:
        """Opens a dataset folder. Raises InputError when it is none, is unfinished, or was made by another version."""
        record_path = folder / RECORD_FILE
        if not record_path.is_file():
            raise InputError(
                f"no dataset at {folder}: expected {RECORD_FILE} in it, found none; make one with "
                f"`drafter-data merge RUN... --out {folder}`",
                reason="dataset-missing",
            )
        try:
            record = DatasetRecord.model_validate_json(record_path.read_bytes())
        except ValidationError as error:
            raise InputError(
                f"{record_path} is not a dataset record: {error.errors()[0]['msg']}; merge the runs again into a new folder",
                reason="dataset-record-invalid",
            ) from error
        rows_path = folder / ROWS_FILE
        if not rows_path.is_file() or rows_path.stat().st_size != record.rows_bytes:
            found = f"{rows_path.stat().st_size} bytes" if rows_path.is_file() else "no file"
            raise InputError(
                f"{rows_path}: expected {record.rows_bytes} bytes, found {found}; merge the runs again into a new folder",
                reason="dataset-damaged",
            )
        return cls(folder, record)

    @property
    def rows_path(self) -> Path:
        """The Parquet file of the rows."""
        return self.folder / ROWS_FILE

    @cached_property
    def _group_starts(self) -> NDArray[np.int64]:
        metadata = pq.read_metadata(self.rows_path)
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    def columns(self, *names: str) -> pa.Table:
        """The named columns of all rows (cheap for keys and counts; ids and masks of a large dataset do not fit in memory)."""
        with pq.ParquetFile(self.rows_path) as file:  # pq.read_table would import a good deal more
            return file.read(columns=list(names))

    def samples(self) -> Iterator[Sample]:
        """All rows in file order."""
        for group in range(len(self._group_starts) - 1):
            yield from self._group_samples(group)

    def take(self, rows: Sequence[int]) -> Iterator[Sample]:
        """The given rows, grouped by row group: in ascending order of row, whatever the order asked in."""
        wanted = np.unique(np.asarray(rows, dtype=np.int64))
        groups = np.searchsorted(self._group_starts, wanted, side="right") - 1
        for group in np.unique(groups):
            inside = wanted[groups == group]
            yield from self._group_samples(int(group), inside - self._group_starts[group])

    def _group_samples(self, group: int, inside: NDArray[np.int64] | None = None) -> Iterator[Sample]:
        with pq.ParquetFile(self.rows_path) as file:
            table = file.read_row_group(group)
        positions = np.arange(table.num_rows) if inside is None else inside
        if inside is not None:
            table = table.take(pa.array(inside))
        ids, masks = table.column("input_ids").combine_chunks(), table.column("loss_mask").combine_chunks()
        text = {name: table.column(name).to_pylist() for name in ("sample_key", "state_key", "run", "source_id")}
        for k, position in enumerate(positions):
            yield Sample(
                row=int(self._group_starts[group] + position),
                sample_key=text["sample_key"][k],
                state_key=text["state_key"][k],
                run=text["run"][k],
                source_id=text["source_id"][k],
                input_ids_s=ids[k].values.to_numpy(zero_copy_only=False),
                loss_mask_s=masks[k].values.to_numpy(zero_copy_only=False),
            )
