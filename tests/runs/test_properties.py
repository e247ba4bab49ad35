"""Any mix of runs: kept + dropped = read, order-independent, idempotent, and what is kept is what was written."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_data.dataset import Dataset
from drafter_data.errors import InputError
from drafter_data.runs.merge import check_runs, merge_runs
from drafter_data.runs.options import MergeOptions
from drafter_data.tokenising.builtin import BuiltinTokenizer
from tests.runs.forms import FORMS, TABLE_FORMS, Row, chat, tokens, write_bytes, write_run

DECODE = BuiltinTokenizer().decode
WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


def chat_with_id(question: str, answer: str, source_id: str) -> Row:
    return chat(question, answer, id=source_id)


CHATS = st.builds(chat_with_id, WORDS, WORDS, st.sampled_from(["1", "2", "3"]))
TOKENS = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1, max_size=6).map(
    lambda pairs: tokens([i for i, _ in pairs], [int(m) for _, m in pairs])
)
SOUND = CHATS | TOKENS
BROKEN = st.sampled_from([{"messages": []}, {"prompt": "x"}, {"x": 1}, 7, "text", None, tokens([1], [1, 1]), tokens([-1], [1])])
RUNS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(TABLE_FORMS), st.lists(CHATS, min_size=1, max_size=5) | st.lists(TOKENS, min_size=1, max_size=5)),
        st.tuples(st.sampled_from([f for f in FORMS if f not in TABLE_FORMS]), st.lists(SOUND | BROKEN, min_size=1, max_size=6)),
    ),
    min_size=1,
    max_size=3,
)
ANYTHING = MergeOptions(max_dropped_share=1.0)


def write_all(folder: Path, runs: list[tuple[str, list[Any]]]) -> list[str]:
    return [write_run(folder, f"run{number}", form, rows) for number, (form, rows) in enumerate(runs)]


def tolerant(sources: list[str], out: Path) -> Any:
    try:
        return merge_runs(sources, out, options=ANYTHING)
    except InputError as error:  # nothing but faults in a run, or no row left
        return error.reason


@settings(max_examples=40, deadline=None)
@given(runs=RUNS, data=st.data())
def test_any_mix_of_runs_accounts_for_every_row(runs: list[tuple[str, list[Any]]], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources = write_all(folder / "in", runs)
        record = tolerant(sources, folder / "a")
        shuffled = data.draw(st.permutations(sources))
        assert tolerant(shuffled, folder / "b") == record
        if isinstance(record, str):
            assert not (folder / "a").exists()
            return
        assert (folder / "a" / "rows.parquet").read_bytes() == (folder / "b" / "rows.parquet").read_bytes()
        for report, (_, rows) in zip(record.runs, runs, strict=True):
            assert report.read == len(rows) == report.kept + sum(report.dropped.values())
        assert check_runs(sources, ANYTHING) == record.runs
        again = merge_runs([str(folder / "a")], folder / "c")
        assert (again.dataset_id, again.rows) == (record.dataset_id, record.rows)
        assert merge_runs(sources, folder / "a", options=ANYTHING) == record
        assert sorted(p.name for p in folder.iterdir()) == ["a", "b", "c", "in"]


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(SOUND, min_size=1, max_size=8), form=st.sampled_from(["jsonl", "json", "jsonl.zst"]))
def test_text_and_ids_survive(rows: list[Any], form: str) -> None:
    expected_text, expected_ids = set(), set()
    for row in rows:
        if "input_ids" in row:
            if any(row["loss_mask"]):
                expected_ids.add((tuple(row["input_ids"]), tuple(row["loss_mask"])))
        else:
            expected_text.add("".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in row["messages"]))
    if not expected_text and not expected_ids:
        return
    with tempfile.TemporaryDirectory() as name:
        merge_runs([write_run(Path(name) / "in", "r", form, rows)], Path(name) / "out")
        texts, ids = set(), set()
        for sample in Dataset.open(Path(name) / "out").samples():
            if sample.source_id in {"1", "2", "3"}:
                texts.add(DECODE(sample.input_ids_s))
            else:
                ids.add((tuple(sample.input_ids_s.tolist()), tuple(sample.loss_mask_s.tolist())))
        assert (texts, ids) == (expected_text, expected_ids)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 6),
    form=st.sampled_from(["jsonl", "json", "jsonl.gz"]),
    place=st.floats(0, 1),
    length=st.integers(0, 200),
    junk=st.binary(max_size=20) | st.sampled_from([b'"', b"\\", b"{", b"}", b"]", b"\n", b"\xff", b'{"a": "', b"]}", b"\0"]),
)
def test_damage_at_any_place_costs_the_touched_rows_alone(count: int, form: str, place: float, length: int, junk: bytes) -> None:
    lines = [json.dumps(chat(f'q{i} "{{[', f"a{i} é", id=i), ensure_ascii=False).encode() for i in range(count)]
    is_array = form == "json"
    data = b"[" + b",\n".join(lines) + b"]" if is_array else b"\n".join(lines)
    start = int(place * len(data))
    damaged = data[:start] + junk + data[start + length :]
    untouched = [line for line in lines if data.index(line) + len(line) < start or data.index(line) > start + length]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = write_bytes(folder / f"r.{form}", damaged)
        record = tolerant([path], folder / "out")
        kept = set() if isinstance(record, str) else {DECODE(s.input_ids_s) for s in Dataset.open(folder / "out").samples()}
        if not isinstance(record, str):
            report = record.runs[0]
            assert report.read == report.kept + sum(report.dropped.values())
    expected = {
        "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in json.loads(line)["messages"]) for line in untouched
    }
    assert expected <= kept


@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 30), budget=st.integers(1, 40), seed=st.integers(0, 3), by_tokens=st.booleans())
def test_seeded_sample_keeps_to_its_budget_and_grows_with_it(count: int, budget: int, seed: int, by_tokens: bool) -> None:
    rows = [tokens(range(i, i + 2 + i % 5), [0, 1] + [1] * (i % 5)) for i in range(count)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        a, b = write_run(folder, "a", "jsonl", rows[::2]), write_run(folder, "b", "jsonl", rows[1::2] or rows[:1])
        keys = {}
        for size in (budget, budget + 6):
            options = MergeOptions(sample_tokens=size, seed=seed) if by_tokens else MergeOptions(sample_rows=size, seed=seed)
            try:
                record = merge_runs([a, b], folder / f"o{size}", options=options)
            except InputError as error:
                assert by_tokens
                assert error.reason == "nothing-kept"
                return
            assert merge_runs([b, a], folder / f"o{size}", options=options) == record
            assert (record.tokens if by_tokens else record.rows) <= size
            if not by_tokens:
                assert record.rows == min(size, count)
            assert all(report.read == report.kept + sum(report.dropped.values()) for report in record.runs)
            keys[size] = {s.sample_key for s in Dataset.open(folder / f"o{size}").samples()}
        assert keys[budget] <= keys[budget + 6]


def test_seed_changes_the_sample(tmp_path: Path) -> None:
    run = write_run(tmp_path, "r", "jsonl", [tokens([i, i + 1], [0, 1]) for i in range(200)])
    ids = {
        merge_runs([run], tmp_path / f"o{seed}", options=MergeOptions(sample_rows=20, seed=seed)).dataset_id for seed in range(4)
    }
    assert len(ids) == 4
    assert json.loads((tmp_path / "o3" / "dataset.json").read_text())["options"] == {"sample_rows": "20", "seed": "3"}
