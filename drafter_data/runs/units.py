"""Cutting runs into pieces that workers read side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from drafter_data.errors import InputError
from drafter_data.runs.columnar import read_arrow, read_parquet
from drafter_data.runs.json_lines import read_lines
from drafter_data.runs.json_values import read_values
from drafter_data.runs.opening import holds_lines, opened
from drafter_data.runs.records import Record
from drafter_data.runs.sources import Run, RunFile

UnitForm = Literal["lines", "values", "parquet", "arrow"]
UNIT_BYTES: Final = 16 << 20
_EXPANSION: Final = {None: 1, "gzip": 6, "zstd": 8}


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece of one file: bytes `start..end` of JSON lines, row groups `start..end` of Parquet, or the whole of others."""

    index: int
    run: int
    file: RunFile
    form: UnitForm
    start: int = 0
    end: int | None = None

    @property
    def first_of_file(self) -> bool:
        """Whether line numbers start anew."""
        return self.start == 0


def cut_into_units(runs: Sequence[Run], unit_bytes: int) -> list[Unit]:
    """All pieces of all runs, in the order of run, file and place."""
    units: list[Unit] = []
    for number, run in enumerate(runs):
        for file in run.files:
            for form, start, end in _cut(file, unit_bytes):
                units.append(Unit(len(units), number, file, form, start, end))
    return units


def estimated_bytes(units: Sequence[Unit]) -> int:
    """Bytes of text that the files hold, roughly: what the number of partitions follows from."""
    files = {unit.file.url: unit.file for unit in units}
    return sum(file.size_bytes * (4 if file.form == "parquet" else _EXPANSION[file.codec]) for file in files.values())


def read_unit(unit: Unit) -> Iterator[Record]:
    """The records of one piece; the last item says how many lines it has."""
    with opened(unit.file) as handle:
        if unit.form == "lines":
            yield from read_lines(handle, unit.start, unit.end)
        elif unit.form == "values":
            yield from read_values(handle)
        elif unit.form == "parquet":
            yield from read_parquet(handle, unit.start, unit.end)
        else:
            yield from read_arrow(handle)


def _cut(file: RunFile, unit_bytes: int) -> Iterator[tuple[UnitForm, int, int | None]]:
    if file.form == "parquet":
        for start, end in _groups(file, unit_bytes):
            yield "parquet", start, end
    elif file.form == "arrow":
        yield "arrow", 0, None
    elif file.size_bytes and not holds_lines(file):
        yield "values", 0, None
    elif file.codec is not None or file.size_bytes <= unit_bytes:
        yield "lines", 0, None
    else:
        for start in range(0, file.size_bytes, unit_bytes):
            yield "lines", start, min(start + unit_bytes, file.size_bytes)


def _groups(file: RunFile, unit_bytes: int) -> Iterator[tuple[int, int]]:
    try:
        with opened(file) as handle, pq.ParquetFile(handle) as parquet:
            sizes = [parquet.metadata.row_group(i).total_byte_size for i in range(parquet.num_row_groups)]
    except pa.ArrowException as error:
        raise InputError(f"{file.url}: cannot be read as Parquet: {error}", reason="run-unreadable") from error
    start = held = 0
    for group, size in enumerate(sizes):
        held += size
        if held >= unit_bytes:
            yield start, group + 1
            start, held = group + 1, 0
    if start < len(sizes) or not sizes:
        yield start, len(sizes)
