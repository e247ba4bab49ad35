"""Writing the same rows in every form that a generation run comes in."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]
TEXT_FORMS = ("jsonl", "json", "jsonl.gz", "jsonl.zst", "json.gz", "json.zst")
TABLE_FORMS = ("parquet", "arrow", "folder")
FORMS = (*TEXT_FORMS, *TABLE_FORMS)


def chat(question: str, answer: str, **more: Any) -> Row:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


def tokens(ids: Sequence[int], mask: Sequence[int], **more: Any) -> Row:
    return {"input_ids": list(ids), "loss_mask": list(mask), **more}


def write_run(folder: Path, name: str, form: str, rows: Sequence[Any]) -> str:
    """Writes `rows` as run `name` and returns what to pass to merge."""
    folder.mkdir(parents=True, exist_ok=True)
    if form == "folder":
        path = folder / name
        path.mkdir()
        write_table(path / "data-00000-of-00001.arrow", "arrow", rows)
        (path / "dataset_info.json").write_text("{}")
        (path / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
        return str(path)
    path = folder / f"{name}.{form}"
    if form in TABLE_FORMS:
        write_table(path, form, rows)
    else:
        is_array = form.startswith("json.") or form == "json"
        text = (
            json.dumps(rows, ensure_ascii=False, indent=1)
            if is_array
            else "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)
        )
        write_bytes(path, text.encode())
    return str(path)


def write_bytes(path: Path, data: bytes) -> str:
    """Writes `data`, compressed as the suffix says."""
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":
        data = pa.compress(data, "zstd", asbytes=True)
    path.write_bytes(data)
    return str(path)


def write_table(path: Path, form: str, rows: Sequence[Row]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pa.table({name: [row.get(name) for row in rows] for name in names})
    if form == "parquet":
        pq.write_table(table, path, row_group_size=2)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
