"""`make bench-merge`: our merge and `datasets` on the same rows, one after the other in one run, two processes each.

Sides: ours; `prepare-data` and `lean`, the two ways of `peer.py`. With `--speculators PYTHON` (an environment that has the package)
speculators' own command takes the place of the first where it can: tokenised rows need no server. Wall and CPU seconds, peak memory
of the process tree (sum of RSS), rows. Rounds alternate between the sides; the table shows the median of each.

`--large-gb 10` merges that much tokenised JSONL as well, once, by ours alone, for the memory it takes.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.merge.inputs import write_conversations, write_many_tokenised, write_tokenised
from benchmarks.reporting import Cell, Result, publish
from drafter_data.tokenising.builtin import FOLDER

PROCESSES = 2
ROOT = Path(__file__).parents[2]
OURS = "drafter-data"
MEMORY_GOAL_MIB = 1024
FASTER_GOALS = {"tokenised": 3.0, "conversations": 1.0}
COLUMNS = ("input", "MB", "side", "wall s", "CPU s", "peak RSS MiB", "rows", "ours is faster by")


def tree_rss_bytes(pid: int) -> int:
    """Sum of the resident bytes of a process and all its descendants."""
    total = 0
    try:
        total = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        children = [child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    except OSError:
        return total
    return total + sum(tree_rss_bytes(int(child)) for child in children)


def measure(argv: list[str], work: Path) -> dict[str, Any]:
    """Runs one side to its end; caches of Hugging Face go below `work`."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "hf"), "TOKENIZERS_PARALLELISM": "false"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    process = subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
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


def command(side: str, kind: str, source: Path, out: Path, speculators: str | None) -> list[str]:
    """What one side is asked to do."""
    if side == OURS:
        tokenizer = ["--tokenizer", str(FOLDER)] if kind == "conversations" else []
        merge = [sys.executable, "-m", "drafter_data", "merge", str(source), "--out", str(out), "--workers", str(PROCESSES)]
        return [*merge, "--json", *tokenizer]
    if side == "speculators":
        prepare = [str(speculators), "-B", "-m", "speculators", "prepare-data", "--model", str(FOLDER), "--data", str(source)]
        return [*prepare, "--output", str(out), "--seq-length", "20000", "--num-preprocessing-workers", str(PROCESSES)]
    peer = Path(__file__).with_name("peer.py")
    return [sys.executable, str(peer), side, kind, str(source), str(out), str(FOLDER), str(PROCESSES)]


def compare(kind: str, source: Path, work: Path, rounds: int, speculators: str | None) -> dict[str, dict[str, float]]:
    """All sides, alternating; the medians of each."""
    sides = [OURS, "speculators" if speculators and kind == "tokenised" else "prepare-data", "lean"]
    taken: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in sides:
            out = work / f"{side}-{number}"
            measured = measure(command(side, kind, source, out, speculators), work)
            rows = json.loads(measured["stdout"])["rows"] if side == OURS else saved_rows(out)
            taken[side].append({**measured, "rows": rows})
            print({name: value for name, value in measured.items() if name != "stdout"}, side, kind, file=sys.stderr)
            for left in (out, work / f"{out.name}.cache", work / "hf"):
                shutil.rmtree(left, ignore_errors=True)
    names = ("wall_s", "cpu_s", "peak_rss_mib", "rows")
    return {side: {name: statistics.median(run[name] for run in runs) for name in names} for side, runs in taken.items()}


def saved_rows(folder: Path) -> int:
    """Rows of a saved dataset, from its shards."""
    import pyarrow as pa

    total = 0
    for path in folder.glob("*.arrow"):
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
            total += sum(batch.num_rows for batch in reader)
    return total


def rows_of(kind: str, size: float, measured: dict[str, dict[str, float]]) -> list[list[Cell]]:
    """Lines of the table."""
    ours = measured[OURS]["wall_s"]
    return [
        [kind, round(size), side, m["wall_s"], m["cpu_s"], int(m["peak_rss_mib"]), int(m["rows"]), round(m["wall_s"] / ours, 2)]
        for side, m in measured.items()
    ]


def goals_of(kind: str, measured: dict[str, dict[str, float]]) -> dict[str, str]:
    """What was asked, and what was reached."""
    goals = {f"{kind}: our peak RSS in MiB (goal < {MEMORY_GOAL_MIB:,})": f"{measured[OURS]['peak_rss_mib']:,.0f}"}
    for side in measured:
        if side != OURS:
            reached = measured[side]["wall_s"] / measured[OURS]["wall_s"]
            goals[f"{kind}: times faster than {side} (goal {FASTER_GOALS[kind]:g})"] = f"{reached:.2f}"
    return goals


def main() -> None:
    """Both inputs, all sides; or the large run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenised-mb", type=float, default=1000)
    parser.add_argument("--conversations-mb", type=float, default=200)
    parser.add_argument("--large-gb", type=float, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--speculators", default=None, help="a Python that has speculators, to run its own prepare-data as well")
    parser.add_argument("--folder", type=Path, default=None, help="where the inputs and outputs go; by default a temporary folder")
    options = parser.parse_args()
    sizes: list[tuple[str, Callable[[Path, int], int], float]] = [
        ("tokenised", write_tokenised, options.tokenised_mb),
        ("conversations", write_conversations, options.conversations_mb),
    ]
    with tempfile.TemporaryDirectory(prefix="bench-merge-", dir=options.folder) as name:
        rows: list[list[Cell]] = []
        goals: dict[str, str] = {}
        for kind, write, size in sizes:
            if size > 0:
                source = Path(name) / f"{kind}.jsonl"
                write(source, int(size * 1e6))
                measured = compare(kind, source, Path(name), options.rounds, options.speculators)
                rows += rows_of(kind, size, measured)
                goals |= goals_of(kind, measured)
                source.unlink()
        if rows:
            publish(_result("merge", "Merge against `datasets`: the same rows, two processes each", "", rows, goals, NOTES))
        if options.large_gb:
            publish(large(Path(name), options.large_gb))


def large(work: Path, size_gb: float) -> Result:
    """One run of many gigabytes, for its memory."""
    source = work / "large.jsonl"
    write_many_tokenised(source, int(size_gb * 1e9))
    measured = measure(command(OURS, "tokenised", source, work / "out", None), work)
    rows = json.loads(measured["stdout"])["rows"]
    goal = {f"peak RSS in MiB (goal < {MEMORY_GOAL_MIB:,})": f"{measured['peak_rss_mib']:,}"}
    lines = rows_of("tokenised", size_gb * 1e3, {OURS: {**measured, "rows": rows}})
    return _result(
        "merge_large",
        "Merge of one large run: memory",
        f" --tokenised-mb 0 --conversations-mb 0 --large-gb {size_gb:g}",
        lines,
        goal,
        (),
    )


NOTES = (
    "`prepare-data` takes the steps of speculators' command, `lean` the fewest that `datasets` needs (benchmarks/merge/peer.py)",
    "`speculators` is that command itself (version 0.9), run where `--speculators PYTHON` names an environment that has it",
    "ours alone looks for repeats and conflicts, checks ids, sorts by content and hashes its output, all inside its time",
    "conversations: with the original every answer is rendered by a vLLM server over HTTP; both peers here render it themselves",
)


def _result(
    name: str, title: str, flags: str, rows: Sequence[Sequence[Cell]], goals: dict[str, str], notes: Sequence[str]
) -> Result:
    return Result(name, title, f"python -m benchmarks.merge.bench{flags}", COLUMNS, rows, goals, notes)


if __name__ == "__main__":
    main()
