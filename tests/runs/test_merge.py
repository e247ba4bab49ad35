"""Merging at its boundary: files in, dataset folder out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_contracts.identity import dataset_id, sample_key, state_key
from drafter_data.dataset import Dataset
from drafter_data.errors import InputError
from drafter_data.lengths import profile_lengths
from drafter_data.runs.merge import merge_runs


def chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


def write_lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_merge_two_runs_keeps_order_of_no_consequence(tmp_path: Path) -> None:
    a = write_lines(tmp_path / "a.jsonl", [chat("hi", "there", id="1"), chat("hi", "there", id="2"), {"messages": []}])
    b = str(tmp_path / "b.parquet")
    rows = {"input_ids": [[5, 6, 7], [5, 6, 7]], "loss_mask": [[0, 1, 1], [0, 0, 1]]}
    pq.write_table(pa.table(rows), b)
    first = merge_runs([a, b], tmp_path / "ab")
    second = merge_runs([b, a], tmp_path / "ba")
    assert first == second
    assert (tmp_path / "ab" / "rows.parquet").read_bytes() == (tmp_path / "ba" / "rows.parquet").read_bytes()
    report_a, report_b = first.runs
    assert (report_a.read, report_a.kept, report_a.dropped) == (3, 1, {"empty-conversation": 1, "repeat": 1})
    assert (report_b.read, report_b.kept, report_b.dropped) == (2, 2, {})
    assert (first.rows, first.distinct_states) == (3, 2)
    samples = list(Dataset.open(tmp_path / "ab").samples())
    assert [s.sample_key for s in samples] == sorted(s.sample_key for s in samples)
    for sample in samples:
        assert sample.state_key == state_key(sample.input_ids_s.tolist())
        assert sample.sample_key == sample_key(sample.state_key, sample.loss_mask_s.tobytes())
    assert first.dataset_id == dataset_id(s.sample_key for s in samples)
    assert not list(tmp_path.glob(".tmp-*"))


def test_merge_into_existing_dataset_is_idempotent_or_refused(tmp_path: Path) -> None:
    a = write_lines(tmp_path / "a.jsonl", [chat("hi", "there")])
    b = write_lines(tmp_path / "b.jsonl", [chat("hi", "you")])
    record = merge_runs([a], tmp_path / "out")
    assert merge_runs([a], tmp_path / "out") == record
    assert merge_runs([str(tmp_path / "out")], tmp_path / "again").dataset_id == record.dataset_id
    with pytest.raises(InputError, match="holds another dataset"):
        merge_runs([b], tmp_path / "out")
    assert Dataset.open(tmp_path / "out").record == record


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "run-missing"),
        (b"", "run-empty"),
        (b"\n \n", "run-empty"),
        (b'{"prompt": "hi"}\n', "prompt-only"),
        (b"PK\x03\x04", "malformed"),
    ],
)
def test_merge_unusable_run_is_refused_with_nothing_written(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "run.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        merge_runs([str(path)], tmp_path / "out")
    assert caught.value.reason == reason
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == (["run.jsonl"] if content is not None else [])


def test_lengths_of_a_dataset_equal_a_direct_count(tmp_path: Path) -> None:
    rows = [{"input_ids": list(range(n)), "loss_mask": [0] * (n - 1) + [1]} for n in (3, 4, 9, 9, 17)]
    record = merge_runs([write_lines(tmp_path / "a.jsonl", rows)], tmp_path / "out", max_tokens=16)
    assert record.runs[0].dropped == {"over-long": 1, "repeat": 1}
    profile = profile_lengths(Dataset.open(tmp_path / "out"), bytes_per_token=10)
    assert profile.state_bytes == 10 * (3 + 4 + 9)
    histogram = dict(zip(profile.histogram_lower_tokens, profile.histogram_samples, strict=True))
    assert histogram == {1: 0, 2: 1, 4: 1, 8: 1}
    assert profile.groups[0].quantiles_tokens["p50"] == 4
    assert (profile.groups[0].supervised_tokens, profile.groups[1].run) == (3, "a")
