"""Public files as people use them: rows read, kept, dropped by reason and supervised tokens, counted without our readers.

The expected numbers come from `json` and from transformers' own chat template and generation mask on the shipped tokenizer.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from drafter_data.dataset import Dataset
from drafter_data.errors import InputError
from drafter_data.runs.merge import merge_runs
from drafter_data.tokenising.builtin import FOLDER

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
FIXTURES = Path(__file__).parents[3] / "shared" / "fixtures"
pytestmark = pytest.mark.skipif(not FIXTURES.is_dir(), reason="the shared fixtures are not here")
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_call": "assistant"}


@dataclass
class Expected:
    read: int = 0
    rows: set[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=set)
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def supervised(self) -> int:
        return sum(sum(mask) for _, mask in self.rows)


@cache
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


def records_of(name: str) -> list[dict[str, Any]]:
    text = (FIXTURES / name).read_text(encoding="utf-8")
    if name.endswith(".jsonl"):
        return [json.loads(line) for line in text.split("\n") if line]
    whole = json.loads(text)
    return whole if isinstance(whole, list) else [whole]


def messages_of(turns: list[dict[str, str]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for turn in turns:
        role, text = turn.get("role") or turn["from"], turn.get("content") or turn.get("value") or ""
        message: dict[str, Any] = {"role": ROLES.get(role, role), "content": text}
        if role == "function_call":
            call = json.loads(text)
            function = {"name": call["name"], "arguments": call["arguments"]}
            message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        messages.append(message)
    return messages


def expected_of(name: str) -> Expected:
    expected = Expected()
    for record in records_of(name):
        expected.read += 1
        if "input_ids" in record:
            row = tuple(record["input_ids"]), tuple(record["loss_mask"])
        else:
            messages = messages_of(record.get("messages") or record["conversations"])
            calls = [bool(m.get("tool_calls")) for m in messages]
            if any(m["role"] == "tool" and not calls[i - 1] for i, m in enumerate(messages)):
                expected.dropped["tool-without-call"] += 1
                continue
            tools = json.loads(record["tools"]) if record.get("tools") else None
            encoded = tokenizer().apply_chat_template(
                messages, tools=tools or None, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            row = tuple(encoded["input_ids"]), tuple(encoded["assistant_masks"])
        if row in expected.rows:
            expected.dropped["repeat"] += 1
        expected.rows.add(row)
    return expected


TABLE = {
    # file: rows read, kept, dropped by reason, supervised tokens
    "FastChat__dummy_conversation.json": (500, 500, {}, 33390),
    "LLaMA-Factory__glaive_toolcall_zh_demo.json": (300, 255, {"repeat": 43, "tool-without-call": 2}, 252844),
    "Model-Optimizer__synthetic_conversations_1k.jsonl": (1000, 1000, {}, 57780),
    "SpecForge__repo-wiki_standard_ref.json": (1, 1, {}, 2547),
    "TorchSpec__sample_conversations.jsonl": (1001, 842, {"repeat": 159}, 263253),
}


@pytest.mark.parametrize("name", TABLE)
def test_public_file_merges_with_independently_counted_rows(tmp_path: Path, name: str) -> None:
    expected = expected_of(name)
    record = merge_runs([str(FIXTURES / name)], tmp_path / "out")
    (report,) = record.runs
    found = {(tuple(s.input_ids_s.tolist()), tuple(s.loss_mask_s.tolist())) for s in Dataset.open(tmp_path / "out").samples()}
    assert found == expected.rows
    assert (report.read, report.kept, report.dropped) == (expected.read, len(expected.rows), dict(expected.dropped))
    assert report.supervised_tokens == expected.supervised
    assert (report.read, report.kept, report.dropped, report.supervised_tokens) == TABLE[name]


def test_all_public_files_merge_together_in_any_order(tmp_path: Path) -> None:
    names = [str(FIXTURES / name) for name in TABLE]
    first = merge_runs(names, tmp_path / "a")
    second = merge_runs([names[3], names[0], names[4], names[2], names[1]], tmp_path / "b")
    assert first == second
    assert (tmp_path / "a" / "rows.parquet").read_bytes() == (tmp_path / "b" / "rows.parquet").read_bytes()
    assert first.rows == sum(kept for _, kept, _, _ in TABLE.values())


def test_file_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        merge_runs([str(FIXTURES / "README.md")], tmp_path / "out")
    assert caught.value.reason == "run-empty"
