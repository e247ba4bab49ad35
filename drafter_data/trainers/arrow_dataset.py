"""The folder that `datasets.Dataset.save_to_disk` leaves, written with pyarrow alone.

Format, read from datasets 5.1.0: an Arrow stream whose schema carries the features as JSON under the key `huggingface`,
`dataset_info.json` with the features, `state.json` with the file names, the format (`torch`) and a fingerprint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from drafter_data.dataset import Dataset, Sample
from drafter_data.files import atomic_path, write_atomic

DATA_FILE = "data-00000-of-00001.arrow"
_BATCH_ROWS = 1000
_BATCH_TOKENS = 1 << 22


def _list_of(dtype: str) -> dict[str, Any]:
    return {"feature": {"dtype": dtype, "_type": "Value"}, "_type": "List"}


_FEATURES = {"input_ids": _list_of("int32"), "loss_mask": _list_of("int64"), "seq_len": {"dtype": "int64", "_type": "Value"}}
_SCHEMA = pa.schema(
    [("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.int64())), ("seq_len", pa.int64())],
    metadata={"huggingface": json.dumps({"info": {"features": _FEATURES}})},
)


def write_arrow_dataset(folder: Path, dataset: Dataset, groups: list[list[int]], fingerprint: str) -> None:
    """Writes the dataset's rows, group after group, ascending inside each group.

    Columns: `input_ids` list<int32>, `loss_mask` list<int64>, `seq_len` int64. `fingerprint` is what `datasets` caches by.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / DATA_FILE) as temporary, pa.ipc.new_stream(str(temporary), _SCHEMA) as stream:
        for batch in _batches(sample for rows in groups for sample in dataset.take(rows)):
            stream.write_batch(_record_batch(batch))
    info = {"citation": "", "description": "", "features": _FEATURES, "homepage": "", "license": ""}
    write_atomic(folder / "dataset_info.json", json.dumps(info, indent=2))
    state = {
        "_data_files": [{"filename": DATA_FILE}],
        "_fingerprint": fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": "torch",
        "_output_all_columns": False,
        "_split": None,
    }
    write_atomic(folder / "state.json", json.dumps(state, indent=2))


def read_arrow_dataset(folder: Path) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int64]]]:
    """Token ids int32 [S] and loss masks int64 [S], row by row; memory is bounded by one batch."""
    with pa.memory_map(str(folder / DATA_FILE)) as source:
        for batch in pa.ipc.open_stream(source):
            ids, masks = batch.column("input_ids"), batch.column("loss_mask")
            for k in range(batch.num_rows):
                yield ids[k].values.to_numpy(), masks[k].values.to_numpy()


def _batches(samples: Iterator[Sample]) -> Iterator[list[Sample]]:
    batch: list[Sample] = []
    tokens = 0
    for sample in samples:
        batch.append(sample)
        tokens += sample.tokens
        if len(batch) >= _BATCH_ROWS or tokens >= _BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch


def _record_batch(samples: list[Sample]) -> pa.RecordBatch:
    lengths = np.array([sample.tokens for sample in samples], dtype=np.int64)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    ids = pa.array(np.concatenate([sample.input_ids_s for sample in samples]).astype(np.int32))
    masks = pa.array(np.concatenate([sample.loss_mask_s for sample in samples]).astype(np.int64))
    columns = [pa.ListArray.from_arrays(offsets, ids), pa.ListArray.from_arrays(offsets, masks), pa.array(lengths)]
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)
