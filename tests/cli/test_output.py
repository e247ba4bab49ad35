"""What the commands print: values as they are, and wide enough for a log."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafter_data.cli.main import run
from drafter_data.cli.output import print_lines, print_table
from drafter_data.units import duration, gigabytes
from tests.support.datasets import random_prompts, write_dataset


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


def test_table_with_brackets_in_its_values_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("[bold]title", ("[a]", "b"), [("[tokens, layers, hidden]", "[/x]"), (":smile:", 1234)])
    out = capsys.readouterr().out
    for shown in ("[bold]title", "[a]", "[tokens, layers, hidden]", "[/x]", ":smile:", "1,234"):
        assert shown in out


def test_output_in_a_log_is_not_cut_at_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("t", ("file", "found"), [("f" * 70, "g" * 70)])
    print_lines("l" * 300)
    out = capsys.readouterr().out
    assert "f" * 70 in out and "g" * 70 in out and "l" * 300 in out


def test_lengths_of_a_folder_with_brackets_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_dataset(tmp_path / "[/x]", random_prompts(5, 5, 9)).folder
    assert run(["lengths", str(folder), "--bytes-per-token", "65544"]) == 0
    assert "tokens a row" in capsys.readouterr().out
    assert run(["validate", str(folder)]) == 2
    assert "[/x]" in capsys.readouterr().err


def test_units_change_where_the_next_one_reads_better() -> None:
    assert [duration(seconds) for seconds in (119, 120, 7199, 7200)] == ["119 s", "2 min", "120 min", "2.0 h"]
    assert [gigabytes(size) for size in (999_000_000, 1_000_000_000)] == ["999.00 MB", "1.0 GB"]
