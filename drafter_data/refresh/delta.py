"""What is new in a dataset version beside an earlier one, as rows and as a dataset of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from data_contracts.dataset import RECORD_FILE, ROWS_FILE, DatasetRecord
from data_contracts.identity import new_dataset_digest
from drafter_data.dataset import DATASET_SCHEMA, Dataset
from drafter_data.files import atomic_path, fsync_folder, temporary_name, write_atomic, xxh3_of


def new_rows(dataset: Dataset, earlier: Dataset | None) -> NDArray[np.bool_]:
    """Which rows of `dataset` the earlier version has not, by sample key: bool [R]."""
    known = set(_keys(earlier)) if earlier is not None else set[str]()
    return np.fromiter((key not in known for key in _keys(dataset)), dtype=bool, count=dataset.record.rows)


def _keys(dataset: Dataset) -> list[str]:
    return dataset.columns("sample_key").column("sample_key").to_pylist()


def write_delta(dataset: Dataset, new_r: NDArray[np.bool_], folder: Path) -> Dataset:
    """The new rows as a dataset in `folder/<its id>`; one that is there already is returned as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / temporary_name("delta")
    scratch.mkdir()
    try:
        record = _write(dataset, new_r, scratch)
        final = folder / record.dataset_id
        if not (final / RECORD_FILE).is_file():
            shutil.rmtree(final, ignore_errors=True)
            scratch.replace(final)
            fsync_folder(folder)
        return Dataset.open(final)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write(dataset: Dataset, new_r: NDArray[np.bool_], scratch: Path) -> DatasetRecord:
    digest, states = new_dataset_digest(), set[str]()
    tokens, supervised, longest, start = 0, 0, 0, 0
    with (
        atomic_path(scratch / ROWS_FILE) as path,
        pq.ParquetFile(dataset.rows_path) as source,
        pq.ParquetWriter(path, DATASET_SCHEMA) as writer,
    ):
        for group in range(source.num_row_groups):
            table = source.read_row_group(group)
            mine = table.filter(pa.array(new_r[start : start + table.num_rows]))
            start += table.num_rows
            if not mine.num_rows:
                continue
            writer.write_table(mine.cast(DATASET_SCHEMA))
            for key in mine.column("sample_key").to_pylist():  # ascending, as in the file
                digest.update(bytes.fromhex(key))
            states.update(mine.column("state_key").to_pylist())
            lengths = mine.column("num_tokens").to_numpy()
            tokens, longest = tokens + int(lengths.sum()), max(longest, int(lengths.max()))
            supervised += int(mine.column("num_supervised").to_numpy().sum())
    rows = scratch / ROWS_FILE
    record = dataset.record.model_copy(
        update={
            "dataset_id": digest.hexdigest(),
            "rows": int(new_r.sum()),
            "distinct_states": len(states),
            "tokens": tokens,
            "supervised_tokens": supervised,
            "longest_tokens": longest,
            "rows_bytes": rows.stat().st_size,
            "rows_xxh3": xxh3_of(rows),
            "runs": (),
            "conflicts": (),
            "options": {**dataset.record.options, "delta_of": dataset.record.dataset_id},
        }
    )
    write_atomic(scratch / RECORD_FILE, record.model_dump_json(indent=2))
    return record
