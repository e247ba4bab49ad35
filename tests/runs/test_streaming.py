"""Large, parallel, interrupted and remote merges."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest

from drafter_data.dataset import Dataset
from drafter_data.errors import InputError
from drafter_data.runs import merge as merge_module
from drafter_data.runs.merge import merge_runs
from drafter_data.runs.options import MergeOptions, TokenizeOptions
from drafter_data.runs.rows_file import GROUP_TOKENS
from drafter_data.runs.sources import find_runs
from drafter_data.runs.units import cut_into_units, read_unit
from drafter_data.tokenising.builtin import FOLDER
from tests.runs.forms import chat, tokens, write_bytes, write_run


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 25 MB of tokenised rows, every 50th of them torn, with ids of more than one width."""
    path = tmp_path_factory.mktemp("large") / "large.jsonl"
    random = np.random.default_rng(3)
    with path.open("wb") as out:
        for number in range(2500):
            ids = random.integers(0, 150_000, int(random.integers(2, 2500))).tolist()
            line = json.dumps(tokens(ids, [0, *[1] * (len(ids) - 1)], id=f"r{number}")).encode()
            out.write((line[: len(line) // 2] if number % 50 == 7 else line) + b"\n")
    return path


def test_merge_does_not_depend_on_pieces_partitions_or_processes(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = merge_runs([str(large)], tmp_path / "one", workers=1)
    assert one.runs[0].dropped == {"malformed": 50}
    monkeypatch.setattr(merge_module, "PARTITION_BYTES", 1 << 20)
    monkeypatch.setattr(merge_module, "UNIT_BYTES", 3 << 20)
    two = merge_runs([str(large)], tmp_path / "two", workers=2)
    assert two == one
    for name in ("rows.parquet", "quarantine.jsonl"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    numbers = [json.loads(line)["line"] for line in (tmp_path / "one" / "quarantine.jsonl").read_text().splitlines()]
    assert numbers == [number + 1 for number in range(2500) if number % 50 == 7]
    metadata = pq.read_metadata(tmp_path / "one" / "rows.parquet")
    sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    lengths = [s.tokens for s in Dataset.open(tmp_path / "one").samples()]
    ends = np.cumsum([0, *sizes])
    assert all(sum(lengths[a:b]) <= GROUP_TOKENS for a, b in pairwise(ends))
    assert len(sizes) > 2


@pytest.mark.parametrize("unit_bytes", [1, 7, 50, 64, 1000])
def test_cut_of_a_file_gives_every_line_to_one_piece(tmp_path: Path, unit_bytes: int) -> None:
    lines = [b'{"a": %d}' % (10**i) for i in range(12)] + [b"", b"  ", b'{"b": "' + b"x" * 90 + b'"}', b'{"c": 1}']
    path = write_bytes(tmp_path / "r.jsonl", b"\xef\xbb\xbf" + b"\n".join(lines))
    expected = [json.loads(line) for line in lines if line.strip()]
    records = [list(read_unit(unit)) for unit in cut_into_units(find_runs([path]), unit_bytes)]
    assert [r.value for unit in records for r in unit if not r.lines_only] == expected
    assert sum(unit[-1].line for unit in records) == len(lines)


def test_killed_merge_leaves_nothing_that_looks_finished_and_is_swept(large: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "drafter_data", "merge", str(large), "--out", str(tmp_path / "out"), "--workers", "2"]
    process = subprocess.Popen(argv, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(".tmp-out.*/spill/w*")):
        assert process.poll() is None, "the merge ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError):
        Dataset.open(tmp_path / "out")
    for left in tmp_path.glob(".tmp-*"):
        with pytest.raises(InputError):
            Dataset.open(left)
    while _group_is_alive(process.pid):  # its readers notice by themselves
        assert time.monotonic() < deadline
        time.sleep(0.05)
    record = merge_runs([str(large)], tmp_path / "out", workers=1)
    assert record.rows == 2450
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_merge_broken_off_at_the_keyboard_leaves_nothing(large: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "drafter_data", "merge", str(large), "--out", str(tmp_path / "out"), "--workers", "2"]
    process = subprocess.Popen(argv, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob(".tmp-out.*/spill/w*")):
        assert process.poll() is None, "the merge ended before it could be broken off"
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: the readers are told as well
    _, stderr = process.communicate(timeout=120)
    assert (process.returncode, stderr, list(tmp_path.iterdir())) == (130, "", [])


def _group_is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_merge_at_work_is_not_swept_by_another(large: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "drafter_data", "merge", str(large), "--out", str(tmp_path / "out"), "--workers", "1", "--json"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob(".tmp-out.*/spill/q*")):
        assert process.poll() is None
        time.sleep(0.01)
    merge_runs([write_run(tmp_path / "in", "small", "jsonl", [chat("q", "a")])], tmp_path / "out")
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 2, stdout
    assert "target-in-use" in stderr
    assert Dataset.open(tmp_path / "out").record.rows == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


def test_runs_behind_urls_folders_and_equal_names(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/far.jsonl", json.dumps(chat("q", "far")).encode())
    write_run(tmp_path / "x" / "run", "one", "jsonl", [chat("q", "1")])
    write_run(tmp_path / "x" / "run", "two", "parquet", [chat("q", "2")])
    (tmp_path / "x" / "run" / "README.md").write_text("notes")
    (tmp_path / "x" / "run" / ".hidden.jsonl").write_text("{}")
    other = write_run(tmp_path / "y", "run", "jsonl", [chat("q", "3")])
    local = f"file://{tmp_path / 'x' / 'run'}"
    record = merge_runs(["memory://bucket/far.jsonl", local, other], tmp_path / "out")
    assert {r.run: (r.files, r.kept) for r in record.runs} == {
        "far": (("far.jsonl",), 1),
        "x/run": (("one.jsonl", "two.parquet"), 2),
        "y/run": (("run.jsonl",), 1),
    }
    assert record.runs[1].skipped_files == (".hidden.jsonl", "README.md")
    with pytest.raises(InputError, match="named twice"):
        merge_runs([other, f"file://{other}"], tmp_path / "twice")


@pytest.mark.parametrize("form", ["jsonl.gz", "jsonl.zst", "parquet", "arrow"])
def test_file_that_cannot_be_read_to_its_end_is_refused(tmp_path: Path, form: str) -> None:
    rows = [chat(f"q{i}" * 50, os.urandom(400).hex()) for i in range(200)]
    path = Path(write_run(tmp_path, "r", form, rows))
    path.write_bytes(path.read_bytes()[:-3000])
    with pytest.raises(InputError, match=str(path)) as caught:
        merge_runs([str(path)], tmp_path / "out")
    assert caught.value.reason == "run-unreadable"
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_target_that_is_something_else_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path, "r", "jsonl", [chat("q", "a")])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(InputError) as caught:
        merge_runs([run], tmp_path / "out")
    assert caught.value.reason == "target-in-use"
    with pytest.raises(InputError) as caught:
        merge_runs([run], Path("/proc/nowhere/out"))
    assert caught.value.reason == "target-unwritable"
    (tmp_path / "empty").mkdir()
    assert merge_runs([run], tmp_path / "empty").rows == 1


def test_saved_datasets_folders_are_runs(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [tokens(range(i, i + 5), [0, 0, 1, 1, 1]) for i in range(20)]
    whole = datasets.Dataset.from_list(rows)
    whole.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": whole.select(range(15)), "test": whole.select(range(15, 20))}).save_to_disk(
        str(tmp_path / "splits")
    )
    first = merge_runs([str(tmp_path / "saved")], tmp_path / "a")
    second = merge_runs([str(tmp_path / "splits")], tmp_path / "b")
    assert first.dataset_id == second.dataset_id
    assert (first.rows, second.rows) == (20, 20)


def test_readers_of_a_hugging_face_tokenizer_give_the_same_dataset(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    runs = [write_run(tmp_path, name, "jsonl", [chat(f"{name} {i}", "é漢") for i in range(9)]) for name in ("a", "b")]
    options = MergeOptions(TokenizeOptions(str(FOLDER)))
    two = merge_runs(runs, tmp_path / "two", options=options, workers=2)
    assert two.dataset_id == merge_runs(runs, tmp_path / "builtin").dataset_id
    assert two.template_hash
    missing = MergeOptions(TokenizeOptions(str(tmp_path / "nowhere")))
    with pytest.raises(InputError) as caught:
        merge_runs(runs, tmp_path / "none", options=missing, workers=2)
    assert caught.value.reason == "tokenizer-missing"
