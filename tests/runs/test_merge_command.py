"""`drafter-data merge` and `lengths` at the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drafter_data.cli.main import run
from tests.runs.forms import chat, tokens, write_run


def json_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    status = run([*arguments])
    return status, json.loads(capsys.readouterr().out)


def test_merge_check_tells_what_would_happen_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path, "r", "jsonl", [chat("q", "a"), chat("q", "a"), {"x": 1}])
    status, reports = json_of(capsys, "merge", path, "--check", "--json")
    assert (status, reports[0]["read"], reports[0]["kept"], reports[0]["dropped"]) == (0, 3, 1, {"foreign-row": 1, "repeat": 1})
    assert [p.name for p in tmp_path.iterdir()] == ["r.jsonl"]
    assert run(["merge", path, "--check", "--max-dropped-share", "0"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("drafter-data: foreign-row: run r: 1 of 3 rows cannot be used")
    assert error.count("\n") == 1


def test_merge_and_lengths_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path, "r", "parquet", [tokens(range(n), [0] + [1] * (n - 1)) for n in (2, 5, 9)])
    out = str(tmp_path / "out")
    status, record = json_of(capsys, "merge", path, "--out", out, "--json", "--sample-rows", "2", "--role", "narrator=system")
    assert (status, record["rows"]) == (0, 2)
    assert record["options"]["sample_rows"] == "2"
    status, profile = json_of(capsys, "lengths", out, "--bytes-per-token", "8", "--json")
    assert (status, profile["state_bytes"]) == (0, 8 * record["tokens"])
    assert json.loads((tmp_path / "out" / "lengths.json").read_text()) == profile
    assert run(["merge", path, "--out", out, "--sample-rows", "2", "--role", "narrator=system"]) == 0
    assert "3" in capsys.readouterr().out
    assert run(["lengths", out]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--max-tokens", "1", "--out", "o"],
        ["--role", "x", "--out", "o"],
        ["--role", "x=boss", "--out", "o"],
        ["--over-long", "cut", "--out", "o"],
        ["--max-dropped-share", "2", "--out", "o"],
    ],
)
def test_merge_with_bad_usage_exits_2_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    path = write_run(tmp_path, "r", "jsonl", [chat("q", "a")])
    assert run(["merge", path, *[str(tmp_path / a) if a == "o" else a for a in arguments]]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["r.jsonl"]
