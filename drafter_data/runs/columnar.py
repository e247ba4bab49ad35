"""Records of Parquet and Arrow files, whatever widths their columns have.

Every value is read through the declared form of a row (`rows.py`), never through the file's own schema. A struct column of
such a file holds null for every key that any row has: those nulls are taken out again, so that a row gives the same token
ids as the record that it was made of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from drafter_data.runs import reasons
from drafter_data.runs.conversations import CONVERSATION_COLUMNS
from drafter_data.runs.records import Record, broken
from drafter_data.runs.rows import ID_COLUMNS, MASK_COLUMNS, PROMPT_COLUMNS

_BATCH_ROWS: Final = 256
_COLUMNS: Final = frozenset(
    {"input_ids", "labels", "tools", "system", *MASK_COLUMNS, *CONVERSATION_COLUMNS, *PROMPT_COLUMNS, *ID_COLUMNS}
)
_NUMBERS: Final = frozenset({"input_ids", "labels", *MASK_COLUMNS})

_VALUE_FAULTS: Final = (ValueError, OverflowError, pa.ArrowException)
"""Text that is no UTF-8, times that Python has no name for: the file holds them, Python does not."""


@dataclass(frozen=True, slots=True)
class _Unreadable:
    reason: str
    why: str


def read_parquet(handle: IO[bytes], first_group: int = 0, last_group: int | None = None) -> Iterator[Record]:
    """The rows of the row groups `first_group..last_group`, numbered from 1."""
    with pq.ParquetFile(handle, buffer_size=1 << 20, pre_buffer=False) as file:
        groups = list(range(first_group, file.num_row_groups if last_group is None else last_group))
        names = file.schema_arrow.names
        wanted = [name for name in names if name in _COLUMNS] or names[:1]
        batches = file.iter_batches(batch_size=_BATCH_ROWS, row_groups=groups, columns=wanted, use_threads=False)
        yield from _records(batches, names)


def read_arrow(handle: IO[bytes]) -> Iterator[Record]:
    """The rows of an Arrow file or stream (a shard of a saved `datasets` folder), numbered from 1."""
    is_file = handle.read(6) == b"ARROW1"
    handle.seek(0)
    if is_file:
        with pa.ipc.open_file(handle) as reader:
            yield from _records((reader.get_batch(i) for i in range(reader.num_record_batches)), reader.schema.names)
    else:
        with pa.ipc.open_stream(handle) as reader:
            yield from _records(reader, reader.schema.names)


def _records(batches: Iterator[pa.RecordBatch] | Any, names: list[str]) -> Iterator[Record]:
    number = 0
    others = {name: None for name in names if name not in _COLUMNS}
    twice = [name for name, times in Counter(names).items() if times > 1 and name in _COLUMNS]
    if twice:
        raise pa.ArrowInvalid(f"column {twice[0]} is there twice; which one is meant?")
    for batch in batches:
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            part = batch.slice(start, _BATCH_ROWS)
            columns = {name: _values(name, part.column(name)) for name in part.schema.names if name in _COLUMNS}
            for row in range(part.num_rows):
                number += 1
                record = {**{name: values[row] for name, values in columns.items()}, **others}
                faults = [value for value in record.values() if isinstance(value, _Unreadable)]
                yield broken(number, faults[0].why, faults[0].reason) if faults else Record(number, record)
    yield Record(number, None, lines_only=True)


def _values(name: str, column: Any) -> list[Any]:
    kind = column.type
    if name in _NUMBERS and (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        flat = kind.value_type
        if (pa.types.is_integer(flat) or pa.types.is_boolean(flat)) and not column.flatten().null_count:
            return [scalar.values.to_numpy(zero_copy_only=False) if scalar.is_valid else None for scalar in column]
    try:
        values = column.to_pylist()
    except _VALUE_FAULTS:
        values = [_value(scalar) for scalar in column]
    return [without_nulls(value) for value in values] if pa.types.is_nested(kind) and name not in _NUMBERS else values


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except _VALUE_FAULTS as error:
        return _Unreadable(reasons.NOT_UNICODE if isinstance(error, UnicodeDecodeError) else reasons.MALFORMED, str(error))


def without_nulls(value: Any) -> Any:
    """A value without the keys that a struct column invented."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value]
    return value
