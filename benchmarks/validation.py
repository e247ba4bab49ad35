"""Validating a store: from the page cache in GB/s a core, and cold against reading the files with `cat`.

The store is made by committing random states. Cold: the files' pages leave the page cache (posix_fadvise) before each turn. Turns
are taken at random moments; the ratio is that of the best of each side, and that of the medians stands beside it: on a virtual
machine with free page reporting the host takes back every two seconds what was freed, and whoever gets such memory for the page
cache, `cat` as well, takes up to three times as long (NOTES.md).
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import time
from pathlib import Path

from benchmarks.ingest import IDENTITY, ROW_BYTES, ingest, make_dumps
from benchmarks.reporting import Cell, Result, median, publish
from benchmarks.world import RAM_DISK, field_lengths, work_folder
from drafter_data.store.store import Store
from drafter_data.validation import validate_store

WORKERS = 2


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".run/bench"), help="a folder on the store's disk")
    parser.add_argument("--sizes-mb", type=float, nargs="*", default=[1, 20, 75])
    parser.add_argument("--total-mb", type=float, default=2000, help="of a store; of 512 states it is learnt what good ones are")
    parser.add_argument("--field-samples", type=int, default=24, help="of a store with lengths like the field's; 0: none")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cold-turns", type=int, default=9)
    options = parser.parse_args()
    rows: list[list[Cell]] = []
    warm, cold = list[str](), list[str]()
    with work_folder(options.work) as work, work_folder(RAM_DISK) as ram:
        stores = {f"{size:g} MB": [_tokens(size)] * max(1, round(options.total_mb / size)) for size in options.sizes_mb}
        if options.field_samples:
            stores["the field's lengths"] = field_lengths(options.field_samples)
        for name, lengths in stores.items():
            root, dumps = work / f"store-{len(rows)}", ram / f"dumps-{len(rows)}"
            ingest(dumps, make_dumps(dumps, lengths, seed=0), root)
            files = sorted(root.glob("states/*/*.safetensors"))
            total = sum(file.stat().st_size for file in files)
            warm_wall, warm_cpu = _validate(root, options.repeats)
            ours, cats = _cold(root, files, options.cold_turns)
            rate, ratio, of_medians = total / warm_cpu / 1e9, min(cats) / min(ours), median(cats) / median(ours)
            rows.append([name, len(files), total / 1e6, warm_wall, warm_cpu, rate, min(cats), min(ours), ratio, of_medians])
            warm.append(f"{rate:.2f} GB/s at {name}")
            cold.append(f"{ratio:.2f} (medians {of_medians:.2f}) at {name}")
    publish(
        Result(
            name="validation",
            title=f"Validation of a store ({WORKERS} workers)",
            command="python -m benchmarks.validation",
            columns=(
                "a state",
                "states",
                "MB in all",
                "warm wall s",
                "warm CPU s",
                "warm GB/s a core",
                "cat, cold s",
                "validate, cold s",
                "cold ratio",
                "of medians",
            ),
            rows=rows,
            goals={
                "from the page cache, a core (goal >= 2 GB/s)": ", ".join(warm),
                "cold, rate over that of cat (goal >= 0.9)": ", ".join(cold),
            },
            notes=[
                "a core: bytes over CPU seconds of the whole process, medians",
                f"cat: `cat FILES > /dev/null`; cold: the best of {options.cold_turns} alternating turns each; and medians",
            ],
        )
    )


def _tokens(size_mb: float) -> int:
    """Of a state of that size."""
    return max(1, round(size_mb * 1e6 / ROW_BYTES))


def _validate(root: Path, repeats: int) -> tuple[float, float]:
    """Medians of wall and CPU seconds."""
    walls, cpus = list[float](), list[float]()
    for _ in range(repeats):
        store = Store.open(root, IDENTITY)
        wall, cpu = time.monotonic(), time.process_time()
        report = validate_store(store, None, workers=WORKERS)
        walls.append(time.monotonic() - wall)
        cpus.append(time.process_time() - cpu)
        store.close()
        assert not report.findings, report.findings[:1]
    return median(walls), median(cpus)


def _cold(root: Path, files: list[Path], turns: int) -> tuple[list[float], list[float]]:
    """Wall seconds of validation and of cat, each from the disk."""
    ours, cats, moments = list[float](), list[float](), random.Random(0)
    for _ in range(turns):
        time.sleep(moments.uniform(0, 2))
        _drop(files)
        started = time.monotonic()
        subprocess.run(["cat", "--", *map(str, files)], check=True, stdout=subprocess.DEVNULL)
        cats.append(time.monotonic() - started)
        time.sleep(moments.uniform(0, 2))
        _drop(files)
        ours.append(_validate(root, 1)[0])
    return ours, cats


def _drop(files: list[Path]) -> None:
    """Takes the files' pages out of the page cache; they were synced when they were committed."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


if __name__ == "__main__":
    main()
