"""Every row of the list of reported faults under "Input runs", with its right value: position, form and order of runs varied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_contracts.dataset import DatasetRecord
from drafter_data.dataset import Dataset, Sample
from drafter_data.errors import InputError
from drafter_data.runs.merge import merge_runs
from drafter_data.runs.options import MergeOptions, TokenizeOptions
from drafter_data.tokenising.builtin import BuiltinTokenizer
from tests.runs.forms import FORMS, TEXT_FORMS, Row, chat, tokens, write_bytes, write_run

DECODE = BuiltinTokenizer().decode
GOOD = [chat(f"question {i}", f"answer {i}", id=f"g{i}") for i in range(3)]


def samples_of(out: Path) -> list[Sample]:
    return list(Dataset.open(out).samples())


def texts_of(out: Path) -> set[str]:
    return {DECODE(sample.input_ids_s) for sample in samples_of(out)}


def rendered(row: Row) -> str:
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in row["messages"])


def merged_both_ways(tmp_path: Path, a: str, b: str, **options: Any) -> DatasetRecord:
    """Merges A+B and B+A, which must give the same record and the same bytes."""
    first = merge_runs([a, b], tmp_path / "ab", **options)
    second = merge_runs([b, a], tmp_path / "ba", **options)
    assert first == second
    for name in ("rows.parquet", "quarantine.jsonl"):
        assert (tmp_path / "ab" / name).read_bytes() == (tmp_path / "ba" / name).read_bytes()
    return first


def quarantine_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "quarantine.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("form", TEXT_FORMS)
def test_byte_order_mark_is_stripped_at_the_start_of_a_file_only(tmp_path: Path, form: str) -> None:
    rows = [chat("\ufeffq", "a \ufeff"), chat("q2", "\ufeff")]
    path = Path(write_run(tmp_path, "plain", form, rows))
    is_array = form.startswith("json.") or form == "json"
    text = json.dumps(rows, ensure_ascii=False) if is_array else "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)
    write_bytes(path, b"\xef\xbb\xbf" + text.encode())
    record = merge_runs([str(path)], tmp_path / "out")
    assert (record.runs[0].read, record.runs[0].kept) == (2, 2)
    assert texts_of(tmp_path / "out") == {rendered(row) for row in rows}


@pytest.mark.parametrize("position", [1, 2])
def test_byte_order_mark_before_a_later_record_is_set_aside_without_it(tmp_path: Path, position: int) -> None:
    lines = [json.dumps(row).encode() for row in GOOD]
    lines[position] = b"\xef\xbb\xbf" + lines[position]
    record = merge_runs([write_bytes(tmp_path / "r.jsonl", b"\n".join(lines))], tmp_path / "out")
    assert (record.runs[0].kept, record.runs[0].dropped) == (3, {"malformed": 1})
    assert [(e["line"], e["record"]) for e in quarantine_of(tmp_path / "out")] == [(position + 1, "\ufeff")]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("position", [0, 1, 3])
def test_line_separators_inside_text_survive_byte_for_byte(tmp_path: Path, form: str, position: int) -> None:
    rows = list(GOOD)
    rows.insert(position, chat("a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\rh\r\ni", "\u2028\x85\u2029", id="s"))
    record = merge_runs([write_run(tmp_path, "r", form, rows)], tmp_path / "out")
    assert (record.runs[0].read, record.runs[0].kept) == (4, 4)
    assert texts_of(tmp_path / "out") == {rendered(row) for row in rows}


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "jsonl.zst"])
@pytest.mark.parametrize("position", ["first", "middle", "last"])
@pytest.mark.parametrize("cut", ["in a string", "in a character", "after a turn", "in a key"])
def test_torn_record_is_set_aside_and_the_one_behind_it_kept(tmp_path: Path, form: str, position: str, cut: str) -> None:
    whole = json.dumps(chat("what is é", "the answer"), ensure_ascii=False).encode()
    at = {
        "in a string": whole.index(b"what") + 2,
        "in a character": whole.index("é".encode()) + 1,
        "after a turn": whole.index(b"}") + 1,
    }
    torn = whole[: at.get(cut, 5)]
    good = [json.dumps(row).encode() for row in GOOD]
    place = {"first": 0, "middle": 1, "last": 2}[position]
    lines = [*good[:place], torn + good[place], *good[place + 1 :]]
    record = merge_runs([write_bytes(tmp_path / f"r.{form}", b"\n".join(lines) + b"\n")], tmp_path / "out")
    report = record.runs[0]
    assert (report.read, report.kept, sum(report.dropped.values())) == (4, 3, 1)
    assert texts_of(tmp_path / "out") == {rendered(row) for row in GOOD}
    (entry,) = quarantine_of(tmp_path / "out")
    assert (entry["run"], entry["file"], entry["line"]) == ("r", f"r.{form}", place + 1)
    assert entry["reason"] == ("not-unicode" if cut == "in a character" else "malformed")
    assert entry["record"].encode(errors="surrogateescape") == torn


@pytest.mark.parametrize(
    "tail", [b"", b'{"messages": [{"role": "us', b'{"id": 7, "messages": [{"role": "user", "content": "caf\xc3', b"\0\0\0\0"]
)
def test_last_record_without_its_newline_is_kept_and_a_torn_one_counted(tmp_path: Path, tail: bytes) -> None:
    lines = b"\n".join(json.dumps(row).encode() for row in GOOD)
    data = lines if not tail else lines + b"\n" + tail
    record = merge_runs([write_bytes(tmp_path / "r.jsonl", data)], tmp_path / "out")
    assert (record.runs[0].read, record.runs[0].kept) == (3 + bool(tail), 3)
    glued = b"".join(json.dumps(row).encode() for row in GOOD)  # complete records that only lack their newlines
    record = merge_runs([write_bytes(tmp_path / "glued.jsonl", glued + tail)], tmp_path / "out2")
    assert (record.runs[0].read, record.runs[0].kept) == (3 + bool(tail), 3)


@pytest.mark.parametrize("form", ["json", "json.gz"])
def test_torn_array_keeps_every_complete_element(tmp_path: Path, form: str) -> None:
    whole = json.dumps([*GOOD, chat("x", "y")]).encode()
    record = merge_runs([write_bytes(tmp_path / f"r.{form}", whole[:-20])], tmp_path / "out")
    assert (record.runs[0].read, record.runs[0].kept, record.runs[0].dropped) == (4, 3, {"malformed": 1})
    broken_middle = json.dumps(GOOD[:2])[:-1] + ', {"messages": [nonsense "}"]}, ' + json.dumps(GOOD[2]) + "]"
    record = merge_runs([write_bytes(tmp_path / f"m.{form}", broken_middle.encode())], tmp_path / "out2")
    assert (record.runs[0].read, record.runs[0].kept, record.runs[0].dropped) == (4, 3, {"malformed": 1})
    assert [entry["line"] for entry in quarantine_of(tmp_path / "out2")] == [3]


@pytest.mark.parametrize("ids_type", [pa.int32(), pa.int64(), pa.uint16(), pa.uint64(), pa.float64()])
@pytest.mark.parametrize("mask_type", [pa.uint8(), pa.bool_(), pa.int64(), pa.float32()])
def test_integer_and_boolean_widths_of_runs_do_not_matter(tmp_path: Path, ids_type: pa.DataType, mask_type: pa.DataType) -> None:
    ids, mask = [[5, 6, 7], [8, 9, 10]], [[0, 1, 1], [0, 0, 1]]
    columns = {
        "input_ids": pa.array(ids, pa.list_(ids_type)),
        "loss_mask": pa.array(mask, pa.list_(pa.int64())).cast(pa.list_(mask_type)),
    }
    pq.write_table(pa.table(columns), tmp_path / "b.parquet")
    a = write_run(tmp_path, "a", "jsonl", [tokens(ids[0], mask[0]), tokens([1, 2], [False, True])])
    record = merged_both_ways(tmp_path, a, str(tmp_path / "b.parquet"))
    assert [report.dropped for report in record.runs] == [{}, {"repeat": 1}]
    assert {tuple(s.input_ids_s.tolist()): s.loss_mask_s.tolist() for s in samples_of(tmp_path / "ab")} == {
        (5, 6, 7): [0, 1, 1],
        (8, 9, 10): [0, 0, 1],
        (1, 2): [0, 1],
    }


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet", "arrow"])
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (tokens([1, 2, -1], [0, 1, 1]), "ids-out-of-range"),
        (tokens([1, 2, 2**31], [0, 1, 1]), "ids-out-of-range"),
        (tokens([1, 2, 900], [0, 1, 1]), "ids-out-of-range"),
        (tokens([1, 2, 3], [0, 1]), "mask-length"),
        (tokens([1, 2, 3], [0, 1, 1, 1]), "mask-length"),
        (tokens([1, 2, 3], [0, 1, 2]), "mask-values"),
        (tokens([1, 2, 3], [0, 0, 0]), "no-supervised-token"),
        (tokens([], []), "empty-ids"),
    ],
)
def test_tokenised_row_that_is_out_of_step_is_dropped_by_reason(
    tmp_path: Path, form: str, position: int, bad: Row, reason: str
) -> None:
    rows = [tokens([1, 2, 3], [0, 1, 1]), tokens([4, 5, 6], [0, 1, 1])]
    rows.insert(position, bad)
    record = merge_runs([write_run(tmp_path, "r", form, rows)], tmp_path / "out", options=MergeOptions(vocab_size=900))
    assert (record.runs[0].read, record.runs[0].kept, record.runs[0].dropped) == (3, 2, {reason: 1})
    assert all(len(s.input_ids_s) == len(s.loss_mask_s) for s in samples_of(tmp_path / "out"))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"input_ids": [1, 2.5], "loss_mask": [0, 1]}, "ids-type"),
        ({"input_ids": [[1, 2]], "loss_mask": [0, 1]}, "ids-type"),
        ({"input_ids": ["1", "2"], "loss_mask": [0, 1]}, "ids-type"),
        ({"input_ids": [1, None], "loss_mask": [0, 1]}, "ids-type"),
        ({"input_ids": [1, 2]}, "mask-missing"),
        ({"input_ids": [1, 2], "labels": [-100, 3]}, "labels-disagree"),
        ({"input_ids": [1, 2], "labels": [-100, -100]}, "no-supervised-token"),
        ({"prompt": "why?"}, "prompt-only"),
        ({"messages": [{"role": "user", "content": "why?"}]}, "prompt-only"),
        ({"messages": []}, "empty-conversation"),
        ({"messages": None}, "empty-conversation"),
        ({"conversations": [{"from": "human", "value": ""}, {"from": "gpt", "value": ""}]}, "empty-conversation"),
        ({"messages": [{"role": "system", "content": "be"}]}, "system-only"),
        ({"messages": [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "q"}]}, "assistant-first"),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "user", "content": "b"},
                    {"role": "assistant", "content": "c"},
                ]
            },
            "role-repeated",
        ),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "gpt", "value": "c"}]},
            "role-repeated",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "tool", "content": "b"},
                    {"role": "assistant", "content": "c"},
                ]
            },
            "tool-without-call",
        ),
        ({"messages": [{"role": "narrator", "content": "a"}]}, "unknown-role"),
        ({"messages": [{"content": "a"}]}, "malformed-turn"),
        ({"messages": "hello"}, "malformed-turn"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "unsupported-content"),
        (chat("a", "b", tools="{nonsense"), "malformed-tools"),
        ({"other": 1}, "foreign-row"),
        ([1, 2], "malformed"),
        (chat("a \ud800", "b"), "not-unicode"),
    ],
)
@pytest.mark.parametrize("position", [0, 2, 3])
def test_row_that_is_none_has_one_reason_and_the_run_goes_on(tmp_path: Path, bad: Any, reason: str, position: int) -> None:
    rows: list[Any] = list(GOOD)
    rows.insert(position, bad)
    form = {0: "jsonl", 2: "json", 3: "jsonl.zst"}[position]
    text = json.dumps(rows) if form == "json" else "".join(json.dumps(row) + "\n" for row in rows)
    path = write_bytes(tmp_path / f"r.{form}", text.encode())
    record = merge_runs([path], tmp_path / "out")
    assert (record.runs[0].read, record.runs[0].kept, record.runs[0].dropped) == (4, 3, {reason: 1})
    set_aside = quarantine_of(tmp_path / "out")
    if reason == "no-supervised-token":
        assert set_aside == []
    else:
        assert [(e["file"], e["line"], e["reason"]) for e in set_aside] == [(f"r.{form}", position + 1, reason)]
        assert json.loads(set_aside[0]["record"]) == bad


@pytest.mark.parametrize("form", ["jsonl", "parquet", "arrow"])
def test_column_null_throughout_one_run_does_not_type_the_other(tmp_path: Path, form: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "d"}}
    empty = [{**chat("q", "a"), "id": None, "tools": None, "system": None}]
    full = [{**chat("q", "a"), "id": "x", "tools": [tool], "system": "be"}]
    record = merged_both_ways(tmp_path, write_run(tmp_path, "a", form, empty), write_run(tmp_path, "b", form, full))
    assert (record.rows, record.distinct_states) == (2, 2)
    by_run = {s.run: s for s in samples_of(tmp_path / "ab")}
    assert DECODE(by_run["a"].input_ids_s) == rendered(chat("q", "a"))
    assert DECODE(by_run["b"].input_ids_s).startswith(
        f"<|im_start|>tools\n{json.dumps([tool])}<|im_end|>\n<|im_start|>system\nbe<|im_end|>"
    )
    assert (by_run["b"].source_id, by_run["a"].source_id.split(":")[1]) == ("x", "1")


def test_optional_keys_of_other_rows_do_not_change_a_rows_ids(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"city": "Rome"}}}
    rows: list[Row] = [
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "4", "name": "f"},
                {"role": "assistant", "content": "four"},
            ]
        },
        {
            "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "hm"}],
            "tools": [{"name": "g", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}],
        },
        {
            "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b"}],
            "tools": [{"name": "h", "parameters": {"type": "object", "properties": {"y": {"type": "int"}}}}],
        },
    ]
    expected = merge_runs([write_run(tmp_path, "r", "jsonl", rows)], tmp_path / "one").dataset_id
    for form in ("json", "parquet", "arrow", "folder"):
        assert merge_runs([write_run(tmp_path / form, "r", form, rows)], tmp_path / f"out-{form}").dataset_id == expected
    for index, row in enumerate(rows):
        alone = merge_runs([write_run(tmp_path / str(index), "r", "parquet", [row])], tmp_path / f"alone-{index}")
        assert {s.sample_key for s in samples_of(tmp_path / f"alone-{index}")} <= {
            s.sample_key for s in samples_of(tmp_path / "one")
        }
        assert alone.rows == 1


@pytest.mark.parametrize("form", TEXT_FORMS)
def test_tools_as_text_as_list_or_absent_work_per_row(tmp_path: Path, form: str) -> None:
    tools = [{"name": "f", "description": "é"}]
    rows = [
        chat("q", "a", tools=json.dumps(tools)),
        chat("q", "a", tools=tools),
        chat("q", "a"),
        chat("q", "a", tools=""),
        chat("q", "a", tools=[json.dumps(tools[0])]),
    ]
    record = merge_runs([write_run(tmp_path, "r", form, rows)], tmp_path / "out")
    assert (record.rows, record.runs[0].dropped) == (2, {"repeat": 3})


@pytest.mark.parametrize("forms", [("jsonl", "parquet"), ("json", "arrow"), ("jsonl.gz", "folder")])
def test_identity_is_content_and_a_conflicting_id_is_reported(tmp_path: Path, forms: tuple[str, str]) -> None:
    a = write_run(tmp_path, "a", forms[0], [chat("q", "one", id="1"), chat("q", "two", id="2"), chat("q", "one", id="1")])
    b = write_run(tmp_path, "b", forms[1], [chat("q", "two", id="9"), chat("q", "three", id="1"), chat("q", "four", id="4")])
    record = merged_both_ways(tmp_path, b, a)
    assert [(r.kept, r.dropped, r.conflicts) for r in record.runs] == [(2, {"repeat": 1}, 1), (2, {"repeat": 1}, 1)]
    (conflict,) = record.conflicts
    assert (conflict.source_id, conflict.runs, conflict.contents) == ("1", ("a", "b"), 2)
    assert {(s.run, s.source_id) for s in samples_of(tmp_path / "ab")} == {("a", "1"), ("a", "2"), ("b", "1"), ("b", "4")}


def test_over_long_rows_are_cut_ids_and_mask_together_to_many_lengths(tmp_path: Path) -> None:
    rows = [tokens(range(i, i + 1000), [0] * 300 + [1] * 700) for i in range(40)]
    run = write_run(tmp_path, "r", "jsonl", [*rows, tokens(range(5), [0, 0, 0, 0, 1])])
    dropped = merge_runs([run], tmp_path / "drop", max_tokens=600)
    assert (dropped.rows, dropped.runs[0].dropped) == (1, {"over-long": 40})
    cut = merge_runs([run], tmp_path / "cut", options=MergeOptions(max_tokens=600, over_long="cut"))
    assert (cut.rows, cut.longest_tokens <= 600) == (41, True)
    lengths = {len(s.input_ids_s) for s in samples_of(tmp_path / "cut")} - {5}
    assert len(lengths) > 20
    assert min(lengths) > 600 - 256
    for s in samples_of(tmp_path / "cut"):
        first = int(s.input_ids_s[0])
        expected = list(range(first, first + s.tokens))
        assert s.input_ids_s.tolist() == expected
        assert s.loss_mask_s.tolist() == ([0] * 300 + [1] * 700)[: s.tokens] or s.tokens == 5
    unsupervised = merge_runs([run], tmp_path / "short", options=MergeOptions(max_tokens=300, over_long="cut"))
    assert unsupervised.runs[0].dropped == {"no-supervised-token": 40}


def test_dropped_share_above_the_limit_stops_the_merge(tmp_path: Path) -> None:
    rows: list[Any] = [*GOOD, {"messages": []}, {"messages": []}]
    run = write_run(tmp_path / "in", "r", "jsonl", rows)
    assert merge_runs([run], tmp_path / "out").rows == 3
    with pytest.raises(InputError, match=r"2 of 5 rows cannot be used \(empty-conversation 2\).*r\.jsonl:4") as caught:
        merge_runs([run], tmp_path / "strict", options=MergeOptions(max_dropped_share=0.1))
    assert caught.value.reason == "empty-conversation"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


def test_conversation_forms_in_use_give_the_same_ids(tmp_path: Path) -> None:
    turns = [("system", "be"), ("user", "q"), ("assistant", "a")]
    rows: list[Row] = [
        {"messages": [{"role": r, "content": c} for r, c in turns]},
        {"conversations": [{"role": r, "content": c} for r, c in turns]},
        {"conversations": [{"from": {"user": "human", "assistant": "gpt"}.get(r, r), "value": c} for r, c in turns]},
        {"messages": [{"role": r, "content": [{"type": "text", "text": c}]} for r, c in turns]},
        {"messages": [{"role": r, "content": [c]} for r, c in turns]},
        {"messages": [{"role": r, "content": c} for r, c in turns[1:]], "system": "be"},
        {"messages": json.dumps([{"role": r, "content": c} for r, c in turns])},
        {"conversation": [{"role": r.upper(), "content": {"type": "text", "text": c}} for r, c in turns]},
    ]
    record = merge_runs([write_run(tmp_path, "r", "jsonl", rows)], tmp_path / "out")
    assert (record.rows, record.runs[0].dropped) == (1, {"repeat": len(rows) - 1})
    mapped = MergeOptions(TokenizeOptions(), role_map={"narrator": "system", "user": "user", "assistant": "assistant"})
    row = {"messages": [{"role": {"system": "narrator"}.get(r, r), "content": c} for r, c in turns]}
    assert (
        merge_runs([write_run(tmp_path, "n", "jsonl", [row])], tmp_path / "n-out", options=mapped).dataset_id == record.dataset_id
    )


@pytest.mark.parametrize("mask", ["assistant_masks", "labels"])
def test_other_mask_columns_mean_the_same(tmp_path: Path, mask: str) -> None:
    row = {"input_ids": [4, 5, 6], mask: [-100, 5, 6] if mask == "labels" else [0, 1, 1]}
    a = write_run(tmp_path, "a", "jsonl", [tokens([4, 5, 6], [0, 1, 1])])
    record = merge_runs([a, write_run(tmp_path, "b", "parquet", [row])], tmp_path / "out")
    assert (record.rows, record.runs[1].dropped) == (1, {"repeat": 1})


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_reasoning_and_developer_turns_reach_the_template(tmp_path: Path, key: str, form: str) -> None:
    row = chat("q", "a")
    row["messages"][1][key] = "hm"
    row["messages"].insert(0, {"role": "developer", "content": "be"})
    merge_runs([write_run(tmp_path, "r", form, [row])], tmp_path / "out")
    assert texts_of(tmp_path / "out") == {
        "<|im_start|>developer\nbe<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nhm\n</think>\na<|im_end|>\n"
    }
