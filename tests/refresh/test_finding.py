"""Which runs count as arrived, finished and new: markers, quiet time, patterns, what changes and what goes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import fsspec
import pytest

from drafter_data.errors import InputError
from drafter_data.refresh.finding import Arrivals, look_for_runs

ROW = '{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}\n'


def look(*places: Path | str, known: dict[str, str] | None = None, settled: float | None = 600.0) -> Arrivals:
    return look_for_runs([str(place) for place in places], known or {}, marker="_SUCCESS", settled_seconds=settled)


def write(path: Path, *, age: float = 0.0) -> Path:
    """A file of one row that was last written `age` seconds ago, as far as its own time tells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(ROW)
    stamp = time.time() - age
    os.utime(path, (stamp, stamp))
    return path


def names(runs: tuple[str, ...]) -> list[str]:
    return [Path(run).name for run in runs]


def test_marked_folder_and_file_are_finished_and_a_fresh_one_waits(tmp_path: Path) -> None:
    write(tmp_path / "a" / "part.jsonl")
    (tmp_path / "a" / "_SUCCESS").touch()
    write(tmp_path / "b.jsonl")
    (tmp_path / "b.jsonl._SUCCESS").touch()
    write(tmp_path / "c" / "part.jsonl")
    found = look(tmp_path)
    assert (names(found.new), names(found.waiting)) == (["a", "b.jsonl"], ["c"])


def test_unmarked_run_is_finished_once_nothing_in_it_changed_for_the_time(tmp_path: Path) -> None:
    write(tmp_path / "a" / "part.jsonl")
    assert names(look(tmp_path, settled=600).waiting) == ["a"]
    assert names(look(tmp_path, settled=0).new) == ["a"]
    assert names(look(tmp_path, settled=None).waiting) == ["a"], "only a marker counts"


def test_copy_that_keeps_its_old_time_is_not_taken_for_quiet(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", age=86_400)
    assert names(look(tmp_path).waiting) == ["a.jsonl"]


def test_part_without_rows_yet_and_hidden_and_foreign_files_are_no_runs(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    write(tmp_path / ".hidden.jsonl")
    write(tmp_path / "_staging" / "part.jsonl")
    (tmp_path / "open.jsonl").touch()
    assert look(tmp_path, settled=0) == Arrivals((), (), (), ())


def test_run_that_changed_is_new_again_and_one_that_went_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    write(tmp_path / "b.jsonl")
    known = look(tmp_path, settled=0).digests
    assert look(tmp_path, known=known, settled=0).new == ()
    with (tmp_path / "a.jsonl").open("a") as handle:
        handle.write(ROW)
    (tmp_path / "b.jsonl").unlink()
    found = look(tmp_path, known=known, settled=0)
    assert (names(found.new), names(found.gone)) == (["a.jsonl"], ["b.jsonl"])


def test_pattern_and_url_find_their_matches_and_places_may_overlap(tmp_path: Path) -> None:
    for name in ("x-1.jsonl", "x-2.jsonl", "y.jsonl"):
        write(tmp_path / name)
    assert names(look(tmp_path / "x-*.jsonl", tmp_path / "x-1.jsonl", settled=0).new) == ["x-1.jsonl", "x-2.jsonl"]
    assert names(look(tmp_path / "z-*", settled=0).new) == [], "a pattern may match nothing yet"
    memory = fsspec.filesystem("memory")
    memory.pipe("/runs/night-1/part.jsonl", ROW.encode())
    memory.pipe("/runs/night-1/_SUCCESS", b"")
    memory.pipe("/runs/night-2/part.jsonl", ROW.encode())
    try:
        found = look("memory://runs/night-*")
        assert (found.new, found.waiting) == (("memory:///runs/night-1",), ("memory:///runs/night-2",))
    finally:
        memory.rm("/runs", recursive=True)


def test_place_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        look(tmp_path / "nowhere")
    assert refused.value.reason == "run-missing"
