"""Memory of a merge does not grow with its input, whatever the form; a record of any size does not stop it."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pytest

from drafter_data.runs.merge import merge_runs
from drafter_data.runs.records import KEPT_BYTES, MAX_RECORD_BYTES
from tests.runs.forms import chat

MERGE = """
import os, sys, threading
from pathlib import Path
from drafter_data.runs.merge import merge_runs

def highest(pid):
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return 0

def command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""

def watch():
    while not done.wait(0.02):
        for task in Path("/proc/self/task").iterdir():
            children = (task / "children").read_text().split()
            # Between fork and exec a child still has our command line, and our memory counts as its own.
            readers.extend(highest(child) for child in children if command(child) != command("self"))

if __name__ == "__main__":
    readers, done = [0], threading.Event()
    threading.Thread(target=watch, daemon=True).start()
    record = merge_runs([sys.argv[1]], Path(sys.argv[2]), workers=2)
    done.set()
    print(record.rows, highest(os.getpid()) >> 10, max(readers) >> 10)
"""
"""Prints rows, and in MiB the highest resident memory of the merging process and of the largest of its readers."""
READ = """
import sys
from drafter_data.runs.sources import find_runs
from drafter_data.runs.units import cut_into_units, read_unit
rows = sum(not record.lines_only for unit in cut_into_units(find_runs([sys.argv[1]]), 1 << 24) for record in read_unit(unit))
print(rows, next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) >> 10)
"""
"""Prints records, and in MiB the highest resident memory of the process."""


def write_rows(path: Path, size: int) -> int:
    """About `size` bytes (before packing) of different tokenised rows, as one array or a line each; returns how many."""
    random = np.random.default_rng(1)
    bodies = [
        orjson.dumps(random.integers(0, 150_000, n).tolist())[1:-1] + b'],"loss_mask":[0' + b",1" * int(n)
        for n in random.integers(2, 4000, 300)
    ]
    rows = written = 0
    is_array = ".json" in path.suffixes
    with gzip.open(path, "wb", 1) if path.suffix == ".gz" else pa.output_stream(str(path)) as out:  # packs .zst by its suffix
        while written < size:
            between = (b"," if rows else b"[") if is_array else (b"\n" if rows else b"")
            line = b'%s{"input_ids":[%d,%s]}' % (between, rows, bodies[rows % len(bodies)])
            out.write(line)
            written += len(line)
            rows += 1
        out.write(b"]" if is_array else b"\n")
    return rows


def numbers_of(script: str, folder: Path, *arguments: str) -> list[int]:
    path = folder / "measured.py"  # readers are started anew and import their parent's script
    path.write_text(script)
    done = subprocess.run([sys.executable, str(path), *arguments], capture_output=True, text=True, check=True, timeout=300)
    return list(map(int, done.stdout.split()))


def test_memory_of_a_merge_does_not_grow_with_its_input(tmp_path: Path) -> None:
    peaks = []
    for size in (300, 900):  # both fill every buffer there is
        path = tmp_path / f"{size}.jsonl"
        rows = write_rows(path, size * 1_000_000)
        kept, own, reader = numbers_of(MERGE, tmp_path, str(path), str(tmp_path / f"out-{size}"))
        assert kept == rows
        peaks.append((own, reader))
        path.unlink()
    (own, reader), (own_large, reader_large) = peaks
    assert reader > 50, "no reader was seen"
    assert own_large - own < 130, peaks  # as numbers, the 600 MB that came on top take 320 MB; equal merges differ by up to 60
    assert reader_large - reader < 40, peaks
    assert own_large + 2 * reader_large < 800, peaks


@pytest.mark.parametrize("form", ["json", "jsonl.gz", "json.zst"])
def test_memory_of_a_file_that_one_process_reads_does_not_grow_with_it(tmp_path: Path, form: str) -> None:
    peaks = []
    for size in (8, 40):
        path = tmp_path / f"{size}.{form}"
        expected = write_rows(path, size * 1_000_000)
        rows, peak = numbers_of(READ, tmp_path, str(path))
        assert rows == expected
        peaks.append(peak)
    assert peaks[1] - peaks[0] < 15, peaks  # MiB, of 32 MB that came on top


@pytest.mark.parametrize("form", ["jsonl", "json"])
def test_record_above_the_limit_does_not_stop_the_merge(tmp_path: Path, form: str) -> None:
    rows = [json.dumps(chat(f"q{i}", "a")).encode() for i in range(2)]
    huge = json.dumps(chat("x" * (MAX_RECORD_BYTES + (9 << 20)), "a")).encode()
    path = tmp_path / f"r.{form}"
    path.write_bytes(
        b"\n".join((rows[0], huge, rows[1])) if form == "jsonl" else b"[" + b", ".join((rows[0], huge, rows[1])) + b"]"
    )
    report = merge_runs([str(path)], tmp_path / "out", workers=1).runs[0]
    assert (report.read, report.kept, report.dropped) == (3, 2, {"record-too-long": 1})
    (entry,) = [json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()]
    assert (entry["file"], entry["line"], entry["reason"]) == (f"r.{form}", 2, "record-too-long")
    assert entry["record"].encode() == huge[:KEPT_BYTES]
