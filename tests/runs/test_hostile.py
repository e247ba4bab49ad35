"""What a stranger hands in to break the merge: a reason for every row or one clear line, soon, and nothing left."""

from __future__ import annotations

import gzip
import io
import json
import os
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from drafter_data.cli.main import run
from drafter_data.errors import InputError
from drafter_data.runs import json_lines, json_values
from drafter_data.runs.json_values import read_values
from drafter_data.runs.merge import merge_runs
from drafter_data.runs.options import MergeOptions
from drafter_data.runs.sources import find_runs
from drafter_data.runs.units import cut_into_units, read_unit
from tests.runs.forms import chat, write_bytes

ANYTHING = MergeOptions(max_dropped_share=1.0)
GOOD = [json.dumps(chat(f"q{i}", "a")).encode() for i in range(2)]
ASKED = '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x"%s}]%s}'
DEEP = "[" * 50_000 + "]" * 50_000


def with_call(arguments: str) -> bytes:
    return (ASKED % (f', "tool_calls": [{{"function": {{"name": "f", "arguments": "{arguments}"}}}}]', "")).encode()


LINES: dict[str, tuple[bytes, dict[str, int]]] = {
    # name: what stands between two good lines, and what becomes of it
    "nested too deeply": (f'{{"messages": {DEEP}}}'.encode(), {"malformed": 1}),
    "objects in objects": (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, {"malformed": 1}),
    "deep text as turns": (f'{{"messages": "{DEEP}"}}'.encode(), {"malformed-turn": 1}),
    "deep text as tools": ((ASKED % ("", f', "tools": "{DEEP}"')).encode(), {"malformed-tools": 1}),
    "deep text as one tool": ((ASKED % ("", ', "tools": ["{' + DEEP + '"]')).encode(), {"malformed-tools": 1}),
    "deep text as arguments": (with_call(DEEP), {"kept": 1}),
    "opening braces": (b"{" * 300_000, {"malformed": 1}),
    "quotation marks": (b'"' * 300_001, {"malformed": 1}),
    "NUL bytes": (b"\0" * 300_000, {"malformed": 1}),
    "a NUL inside": (GOOD[0].replace(b"q0", b"q\0"), {"malformed": 1}),
    "an escaped NUL": (GOOD[0].replace(b"q0", b"\\u0000"), {"kept": 1}),
    "half a surrogate pair": (GOOD[0].replace(b"q0", b"\\udc00"), {"not-unicode": 1}),
    "half a pair in a call": (with_call("\\\\ud800").replace(b'"f"', b'"\\ud800"'), {"not-unicode": 1}),
    "half a pair as a role": (GOOD[0].replace(b'"user"', b'"\\ud800"'), {"unknown-role": 1}),
    "not a number": (b'{"input_ids": [NaN, 1], "loss_mask": [1, 1]}', {"ids-type": 1}),
    "not a number beside the row": (b'{"score": NaN, "input_ids": [3, 1], "loss_mask": [1, 1]}', {"kept": 1}),
    "infinite mask": (b'{"input_ids": [3, 1], "loss_mask": [1, Infinity]}', {"ids-type": 1}),
    "a number of 5,000 digits": (b'{"input_ids": [' + b"9" * 5000 + b'], "loss_mask": [1]}', {"malformed": 1}),
    "a number of 65 bits": (b'{"input_ids": [18446744073709551616], "loss_mask": [1]}', {"ids-type": 1}),
    "a label of 65 bits": (b'{"input_ids": [1], "labels": [-9223372036854775809]}', {"ids-type": 1}),
    "an exponent": (b'{"input_ids": [1e400], "loss_mask": [1]}', {"ids-type": 1}),
    "a key twice": (b'{"messages": [], ' + GOOD[0].replace(b"q0", b"twice")[1:], {"kept": 1}),
    "carriage returns": (b"\r" + GOOD[0].replace(b"q0", b"cr") + b"\r", {"kept": 1}),
    "two records, an old Mac's line end": (GOOD[0].replace(b"q0", b"r") + b"\r" + GOOD[0].replace(b"q0", b"s"), {"kept": 2}),
    "white space": (b" " * 300_000, {}),
    "no row": (b"{}{}[1, 2]7", {"foreign-row": 2, "malformed": 1}),
}


def outcome(path: Path | str, out: Path) -> dict[str, int]:
    """Rows by what became of them; `read` is checked to be their sum."""
    report = merge_runs([str(path)], out, options=ANYTHING, workers=1).runs[0]
    assert report.read == report.kept + sum(report.dropped.values())
    return {"kept": report.kept, **report.dropped}


@pytest.mark.parametrize("name", LINES)
def test_hostile_line_costs_no_other_row(tmp_path: Path, name: str) -> None:
    line, expected = LINES[name]
    for place in range(3):
        lines = list(GOOD)
        lines.insert(place, line)
        form = ("jsonl", "jsonl.gz", "jsonl.zst")[place]
        path = write_bytes(tmp_path / f"r{place}.{form}", b"\n".join(lines))
        assert Counter(outcome(path, tmp_path / f"out{place}")) == Counter({"kept": 2}) + Counter(expected)


@pytest.mark.parametrize("cut", range(1, len(GOOD[0]) - 1, 7))
def test_element_torn_in_the_middle_of_an_array_costs_itself_alone(tmp_path: Path, cut: int) -> None:
    parts = [GOOD[0], GOOD[0].replace(b"q0", b"torn")[:cut] + GOOD[1], GOOD[0].replace(b"q0", b"q2")]
    path = write_bytes(tmp_path / "r.json", b"[" + b",\n".join(parts) + b"]")
    assert outcome(path, tmp_path / "out") == {"kept": 3, "malformed": 1}


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (b"{" * 300_000, {"malformed": 1}),
        (b'"' + b"\\" * 300_001, {"malformed": 1}),
        (b"," * 300_000 + b"]", {}),
        (b"[" + b"[]" * 100_000, {"malformed": 1}),
        (b"]" * 9, {"malformed": 4}),  # each one that closes nothing takes the next with it
    ],
)
def test_hostile_end_of_an_array_costs_no_other_row(tmp_path: Path, tail: bytes, expected: dict[str, int]) -> None:
    path = write_bytes(tmp_path / "r.json", b"[" + b",".join(GOOD) + b"," + tail)
    assert outcome(path, tmp_path / "out") == {"kept": 2, **expected}


@pytest.mark.parametrize("place", range(4))
def test_record_above_the_limit_is_set_aside_by_its_beginning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: int) -> None:
    """The limit is made small here; `test_memory.py` has it at its size."""
    for module in (json_lines, json_values):
        monkeypatch.setattr(module, "MAX_RECORD_BYTES", 3000)
        monkeypatch.setattr(module, "_BLOCK_BYTES", 512)
    rows: list[Any] = [chat(f'q{i} " {{ [ \\ é', "a") for i in range(3)]
    rows.insert(place, chat('x\\" ]}é' * 2000, "a"))
    expected = [(number + 1, "record-too-long" if number == place else "") for number in range(4)]
    for text in (
        json.dumps(rows, ensure_ascii=False),
        json.dumps(rows, indent=1),
        "\n".join(json.dumps(r, indent=2) for r in rows),
    ):
        found = read_values(io.BytesIO(text.encode()))
        assert [(r.line, r.reason) for r in found if not r.lines_only] == expected
    path = write_bytes(tmp_path / "r.jsonl", "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode())
    for unit_bytes in (300, 5000, 1 << 20):
        lines, found = 0, []
        for unit in cut_into_units(find_runs([path]), unit_bytes):
            *records, last = read_unit(unit)
            found += [(lines + r.line, r.reason) for r in records]
            lines += last.line
        assert found == expected


def badly_encoded() -> pa.Array:
    offsets, letters = (pa.py_buffer(data) for data in (b"\0\0\0\0\2\0\0\0", b"\xff\xfe"))
    return pa.Array.from_buffers(pa.string(), 1, [None, offsets, letters])


IDS, MASK = pa.array([[1, 2]]), pa.array([[0, 1]])
TABLES: dict[str, tuple[dict[str, Any], str]] = {
    # name: columns of one row, and why it is refused ("" where it is kept)
    "text as ids": ({"input_ids": pa.array(["ab"]), "loss_mask": MASK}, "ids-type"),
    "bytes as ids": ({"input_ids": pa.array([b"\1\2"]), "loss_mask": MASK}, "ids-type"),
    "one number as ids": ({"input_ids": pa.array([7]), "loss_mask": MASK}, "ids-type"),
    "lists of lists": ({"input_ids": pa.array([[[1], [2]]]), "loss_mask": MASK}, "ids-type"),
    "null among ids": ({"input_ids": pa.array([[1, None]]), "loss_mask": MASK}, "ids-type"),
    "null columns": ({"input_ids": pa.nulls(1), "loss_mask": pa.nulls(1)}, "foreign-row"),
    "text that is no UTF-8": ({"messages": badly_encoded()}, "not-unicode"),
    "bytes as turns": ({"messages": pa.array([b"\xff"])}, "malformed-turn"),
    "times as turns": ({"messages": pa.array([1], pa.timestamp("s"))}, "malformed-turn"),
    "a time without a name as id": (
        {"id": pa.array([300_000_000_000], pa.timestamp("s")), "input_ids": IDS, "loss_mask": MASK},
        "malformed",
    ),
    "a map as turns": (
        {"messages": pa.array([[[("role", "user")]]], pa.list_(pa.map_(pa.string(), pa.string())))},
        "malformed-turn",
    ),
    "fixed and large lists": (
        {"input_ids": IDS.cast(pa.list_(pa.int64(), 2)), "loss_mask": MASK.cast(pa.large_list(pa.int8()))},
        "",
    ),
    "a dictionary as id": ({"id": pa.array(["a"]).dictionary_encode(), "input_ids": IDS, "loss_mask": MASK}, ""),
    "no row": ({"input_ids": IDS[:0], "loss_mask": MASK[:0]}, "run-empty"),
    "no column": ({}, "run-empty"),
}


def write_columns(folder: Path, form: str, table: pa.Table) -> str:
    path = folder / f"r.{form.removeprefix('file.')}"
    if form == "parquet":
        pq.write_table(table, path)
    else:
        with (pa.ipc.new_file if form == "file.arrow" else pa.ipc.new_stream)(str(path), table.schema) as writer:
            writer.write_table(table)
    return str(path)


@pytest.mark.parametrize("form", ["parquet", "arrow", "file.arrow"])
@pytest.mark.parametrize("name", TABLES)
def test_table_of_other_types_is_kept_or_refused_by_reason(tmp_path: Path, name: str, form: str) -> None:
    columns, reason = TABLES[name]
    path = write_columns(tmp_path, form, pa.table(columns))
    if not reason:
        assert outcome(path, tmp_path / "out") == {"kept": 1}
        return
    with pytest.raises(InputError) as caught:
        merge_runs([path], tmp_path / "out")
    assert caught.value.reason == reason
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["parquet", "arrow", "file.arrow"])
def test_table_with_a_column_twice_is_refused(tmp_path: Path, form: str) -> None:
    path = write_columns(tmp_path, form, pa.Table.from_arrays([IDS, IDS, MASK], names=["input_ids", "input_ids", "loss_mask"]))
    with pytest.raises(InputError, match=r"column input_ids is there twice"):
        merge_runs([path], tmp_path / "out")


def test_folder_with_things_that_are_no_files_keeps_what_is_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "x.jsonl").mkdir(parents=True)
    (folder / "x.jsonl" / "y.jsonl").write_bytes(GOOD[0])
    (folder / "z.parquet").mkdir()
    (folder / "empty.jsonl").touch()
    (folder / "a\nb é[1]*?.jsonl").write_bytes(GOOD[1])
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "loop").symlink_to(".")
    (folder / "up").symlink_to("..")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "s.jsonl"))
        report = merge_runs([str(folder)], tmp_path / "out").runs[0]
    assert (report.read, report.kept) == (2, 2)
    assert {"pipe.jsonl", "s.jsonl"} <= set(report.skipped_files)


@pytest.mark.parametrize(
    "name", ["pipe.jsonl", "gone.jsonl", "itself.jsonl", "garbage.jsonl.gz", "behind.jsonl.gz", "checksum.jsonl.gz", "e.parquet"]
)
def test_file_that_cannot_be_read_is_one_line_and_leaves_nothing(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in" / name
    path.parent.mkdir()
    (path.parent / "good.jsonl").write_bytes(GOOD[0])
    packed = gzip.compress(GOOD[0] * 100)
    if name == "pipe.jsonl":
        os.mkfifo(path)
    elif name.startswith(("gone", "itself")):
        path.symlink_to(name if name.startswith("itself") else "nowhere")
    else:
        data = {"garbage": GOOD[0], "behind": packed + b"\0garbage", "checksum": packed[:-8] + b"12345678", "e": b""}
        path.write_bytes(data[name.partition(".")[0]])
    assert run(["merge", str(path if name == "pipe.jsonl" else path.parent), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("drafter-data: run-unreadable: ")
    assert name in error
    assert error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("source", ["", "/dev/zero", "foo://bar", "/proc/self/mem"])
def test_source_that_is_no_run_is_one_line(tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["merge", source, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_file_name_that_is_no_unicode_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl")).write_bytes(GOOD[0])
    assert run(["merge", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "no UTF-8; rename it" in capsys.readouterr().err
