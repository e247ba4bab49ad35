"""Datasets for tests, written by the contract and not by the merge, so that a fault there does not hide one here."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data_contracts.dataset import RECORD_FILE, ROWS_FILE, DatasetRecord
from data_contracts.identity import dataset_id, sample_key, state_key
from drafter_data.dataset import DATASET_SCHEMA, Dataset
from drafter_data.files import xxh3_of


def random_prompts(count: int, low: int, high: int, *, seed: int = 0, vocab_size: int = 1024) -> list[list[int]]:
    """`count` distinct prompts of `low..high` tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(16, vocab_size) for _ in range(draw.randint(low, high))] for _ in range(count)]


def write_dataset(folder: Path, prompts: Sequence[Sequence[int]], *, group_rows: int = 100) -> Dataset:
    """A finished dataset of these prompts; the second half of each is supervised."""
    rows = []
    for number, ids in enumerate(prompts):
        mask = [0] * (len(ids) // 2) + [1] * (len(ids) - len(ids) // 2)
        key = state_key(ids)
        rows.append(
            {
                "sample_key": sample_key(key, bytes(mask)),
                "state_key": key,
                "run": "test",
                "source_id": str(number),
                "input_ids": list(ids),
                "loss_mask": mask,
                "num_tokens": len(ids),
                "num_supervised": sum(mask),
            }
        )
    rows.sort(key=lambda row: row["sample_key"])
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=DATASET_SCHEMA), folder / ROWS_FILE, row_group_size=group_rows)
    record = DatasetRecord(
        dataset_id=dataset_id(row["sample_key"] for row in rows),
        rows=len(rows),
        distinct_states=len({row["state_key"] for row in rows}),
        tokens=sum(row["num_tokens"] for row in rows),
        supervised_tokens=sum(row["num_supervised"] for row in rows),
        longest_tokens=max(row["num_tokens"] for row in rows),
        rows_bytes=(folder / ROWS_FILE).stat().st_size,
        rows_xxh3=xxh3_of(folder / ROWS_FILE),
        tokenizer="none",
        tokenizer_hash="",
        template_hash="",
        runs=(),
    )
    (folder / RECORD_FILE).write_text(record.model_dump_json())
    return Dataset.open(folder)
