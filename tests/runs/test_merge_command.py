"""`drafter-data merge` and `lengths` at the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from data_contracts.parameters import InputParameters, MergeParameters, ReadRole, StorageParameters
from drafter_data.cli.main import run
from drafter_data.dataset import Dataset
from drafter_data.runs.conversations import ROLES
from drafter_data.runs.options import MergeOptions
from drafter_data.workspace import Workspace
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


def test_merge_prints_a_line_a_run_with_the_reports_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    rows = [chat("q", "a", id=1), chat("q", "a", id=2), chat("q", "b", id=1), {"messages": []}, {"x": 1}]
    a, b = write_run(tmp_path, "first", "jsonl", rows), write_run(tmp_path, "second", "json", [chat("q", "c", id=3)])
    assert run(["merge", a, b, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    reports = Dataset.open(tmp_path / "out").record.runs
    for report in reports:
        cells = [cell.strip() for line in printed.splitlines() if report.run in line for cell in line.split("│")[1:-1]]
        dropped = ", ".join(f"{reason} {count}" for reason, count in report.dropped.items()) or "-"
        share = f"{report.supervised_tokens / report.kept_tokens:.0%}"
        assert cells == [
            report.run, str(report.read), str(report.kept), dropped, str(report.kept_tokens), share, str(report.conflicts)
        ]  # fmt: skip
    assert [report.dropped for report in reports] == [{"empty-conversation": 1, "foreign-row": 1, "repeat": 1}, {}]
    assert "2 rows set aside in" in printed
    assert "ids that stand for more than one content (all of them are kept): 1" in printed


# One value a field that is not its default, the flag that says the same, and the name under which the record keeps it.
GIVEN: dict[str, tuple[Any, list[str], str]] = {
    "over_long": ("cut", ["--over-long", "cut"], "over_long"),
    "supervise_reasoning": (False, ["--no-supervise-reasoning"], "supervise_reasoning"),
    "supervise_tool_calls": (False, ["--no-supervise-tool-calls"], "supervise_tool_calls"),
    "last_turn_only": (True, ["--last-turn-only"], "last_turn_only"),
    "roles": ({"narrator": "system"}, ["--role", "narrator=system"], "role_map"),
    "special_text": ("keep", ["--special-text", "keep"], "special_text"),
    "vocab_size": (900, ["--vocab-size", "900"], "vocab_size"),
    "max_dropped_share": (0.75, ["--max-dropped-share", "0.75"], "max_dropped_share"),
    "sample_rows": (3, ["--sample-rows", "3"], "sample_rows"),
    "sample_tokens": (4000, ["--sample-tokens", "4000"], "sample_tokens"),
    "sample_seed": (5, ["--seed", "5"], "seed"),
    "template_time": ("2024-05-06T07:08:09", ["--template-time", "2024-05-06T07:08:09"], "template_time"),
    "trust_remote_code": (True, ["--trust-remote-code"], "trust_remote_code"),
    "workers": (1, ["--workers", "1"], ""),
}


def test_form_and_command_make_the_same_dataset_of_every_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(GIVEN) == set(MergeParameters.model_fields)
    narrated = {"messages": [{"role": "narrator", "content": "be"}, *chat("q", "a <|im_end|>")["messages"]]}
    rows = [chat(f"q{i}", "a " * (i + 9), id=i) for i in range(12)]
    path = write_run(tmp_path, "r", "jsonl", [narrated, *rows, {"x": 1}, {"x": 2}])
    flags = [flag for _, words, _ in GIVEN.values() for flag in words]
    status, by_command = json_of(capsys, "merge", path, "--out", str(tmp_path / "out"), "--max-tokens", "20", *flags, "--json")
    assert status == 0
    parameters = InputParameters.model_validate({"max_tokens": 20, "merge": {name: value for name, (value, _, _) in GIVEN.items()}})
    workspace = Workspace.of(StorageParameters(folder=str(tmp_path / "work")))
    workspace.prepare()
    options = MergeOptions.of(parameters.merge, tokenizer=parameters.tokenizer, max_tokens=parameters.max_tokens)
    by_form = workspace.merge([path], options, workers=parameters.merge.workers)
    assert by_form.model_dump(mode="json") == by_command
    assert set(by_form.options) == {name for _, _, name in GIVEN.values() if name} | {"max_tokens"}
    assert by_form.rows == 3
    assert Dataset.open(workspace.dataset_link).record == by_form


def test_merge_parameters_are_bounded_and_described_and_default_to_the_mergers_own() -> None:
    assert MergeOptions.of(MergeParameters(), tokenizer="builtin", max_tokens=None) == MergeOptions()
    assert get_args(ReadRole) == ROLES
    schema = InputParameters.model_json_schema()
    section = schema["$defs"]["MergeParameters"]
    for name, field in section["properties"].items():
        assert field["title"], name
        assert 10 < len(field["description"]) <= 130, name
        numbers = [field, *field.get("anyOf", [])]
        for number in numbers:
            if number.get("type") in ("integer", "number"):
                assert {"minimum", "maximum"} <= set(number), name
    bad = [
        ("over_long", "pad"),
        ("max_dropped_share", 1.5),
        ("sample_rows", 0),
        ("vocab_size", 0),
        ("roles", {"x": "boss"}),
        ("rolez", {}),
    ]
    for name, value in bad:
        with pytest.raises(ValidationError):
            InputParameters.model_validate({"merge": {name: value}})
