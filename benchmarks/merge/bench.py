"""`make bench-merge`: our merge and `datasets` on the same rows, one after the other in one run, two processes each.

Prints one JSON line and a table: wall and CPU seconds, peak memory of the process tree (sum of RSS), rows. Sizes: `--tokenised-mb`,
`--conversations-mb`. Rounds alternate between the sides; the table shows the median of each.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.merge.inputs import write_conversations, write_tokenised
from drafter_data.tokenising.builtin import FOLDER

PROCESSES = 2
ROOT = Path(__file__).parents[2]


def tree_rss_bytes(pid: int) -> int:
    """Sum of the resident bytes of a process and all its descendants."""
    total = 0
    try:
        total = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        children = [child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    except OSError:
        return total
    return total + sum(tree_rss_bytes(int(child)) for child in children)


def measure(argv: list[str]) -> dict[str, Any]:
    """Runs one side to its end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peak = [0]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            peak[0] = max(peak[0], tree_rss_bytes(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    stdout, stderr = process.communicate()
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    done.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{argv}: {stderr[-2000:]}")
    return {"wall_s": round(wall, 2), "cpu_s": round(cpu, 2), "peak_rss_mib": round(peak[0] / 2**20), "stdout": stdout}


def compare(kind: str, source: Path, work: Path, rounds: int) -> dict[str, Any]:
    """Both sides, alternating."""
    ours, theirs = [], []
    rows = 0
    for number in range(rounds):
        out = work / f"ours-{number}"
        argv = [
            sys.executable,
            "-m",
            "drafter_data",
            "merge",
            str(source),
            "--out",
            str(out),
            "--workers",
            str(PROCESSES),
            "--json",
        ]
        measured = measure([*argv, *(["--tokenizer", str(FOLDER)] if kind == "conversations" else [])])
        record = json.loads(measured.pop("stdout"))
        rows = record["rows"]
        ours.append({**measured, "rows": rows, "bytes": record["rows_bytes"]})
        shutil.rmtree(out)
        out = work / f"peer-{number}"
        peer = Path(__file__).with_name("peer.py")
        measured = measure([sys.executable, str(peer), kind, str(source), str(out), str(FOLDER), str(PROCESSES)])
        measured.pop("stdout")
        theirs.append({**measured, "rows": saved_rows(out)})
        shutil.rmtree(out)
        shutil.rmtree(f"{out}.cache", ignore_errors=True)
    summary = {
        side: {name: statistics.median(run[name] for run in runs) for name in ("wall_s", "cpu_s", "peak_rss_mib", "rows")}
        for side, runs in (("ours", ours), ("datasets", theirs))
    }
    return {
        "kind": kind,
        "input_bytes": source.stat().st_size,
        **summary,
        "times_faster": round(summary["datasets"]["wall_s"] / summary["ours"]["wall_s"], 2),
    }


def saved_rows(folder: Path) -> int:
    """Rows of a saved dataset, from its shards."""
    import pyarrow as pa

    total = 0
    for path in folder.glob("*.arrow"):
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
            total += sum(batch.num_rows for batch in reader)
    return total


def main() -> None:
    """Both inputs, both sides."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenised-mb", type=float, default=1000)
    parser.add_argument("--conversations-mb", type=float, default=200)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None, help="where the inputs and outputs go; by default a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-merge-", dir=options.folder) as name:
        work = Path(name)
        results = []
        for kind, write, size in (
            ("tokenised", write_tokenised, options.tokenised_mb),
            ("conversations", write_conversations, options.conversations_mb),
        ):
            if size > 0:
                source = work / f"{kind}.jsonl"
                write(source, int(size * 1e6))
                results.append(compare(kind, source, work, options.rounds))
                print(json.dumps(results[-1]), file=sys.stderr)  # a long run shows each result when it has it
                source.unlink()
    print(json.dumps({"benchmark": "merge", "processes": PROCESSES, "load": os.getloadavg()[0], "results": results}))
    table = Table("input", "side", "wall s", "CPU s", "peak RSS MiB", "rows", "times faster")
    for result in results:
        for side in ("ours", "datasets"):
            faster = f"{result['times_faster']:.2f}" if side == "ours" else ""
            measured = result[side]
            label = f"{result['kind']}, {result['input_bytes'] / 1e6:,.0f} MB"
            table.add_row(
                label,
                side,
                f"{measured['wall_s']:.1f}",
                f"{measured['cpu_s']:.1f}",
                f"{measured['peak_rss_mib']:,.0f}",
                f"{measured['rows']:,.0f}",
                faster,
            )
    Console().print(table)


if __name__ == "__main__":
    main()
