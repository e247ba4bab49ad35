"""Against the nearest peer: speculators 0.9.0 `generate-offline-data`, validation on, on the same vLLM server and samples.

Both sides run as the command that a user would type, start-up and preflight included, 32 requests in flight, and take turns. CPU is
the client process's, user and system.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.real_engines import vllm
from benchmarks.reporting import Cell, Result, median, publish
from benchmarks.world import field_lengths, make_dataset, prompts_of, work_folder
from drafter_data.dataset import Dataset
from tests.engines.servers import Running

IN_FLIGHT = 32


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".run/bench"), help="a folder on the store's disk")
    parser.add_argument("--speculators", type=Path, default=_speculators(), help="the program `speculators` of its environment")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--mean-tokens", type=float, default=200.0)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with work_folder(options.work) as work:
        prompts = prompts_of(field_lengths(options.samples, mean_tokens=options.mean_tokens))
        dataset = make_dataset(work / "dataset", prompts)
        _peer_dataset(Dataset.open(dataset), work / "peer-dataset")
        ours, theirs = list[tuple[float, float]](), list[tuple[float, float]]()
        with vllm(work) as running:
            for repeat in range(options.repeats + 1):  # the first turn of each warms up, and does not count
                theirs.append(_theirs(options.speculators, running, work, repeat, options.samples))
                ours.append(_ours(running, dataset, work / f"store-{repeat}"))
    _publish(ours[1:], theirs[1:], options.samples, sum(map(len, prompts)))


def _publish(ours: list[tuple[float, float]], theirs: list[tuple[float, float]], samples: int, tokens: int) -> None:
    rows: list[list[Cell]] = []
    for side, runs in (("speculators generate-offline-data", theirs), ("drafter-data extract", ours)):
        walls, cpus = [wall for wall, _ in runs], [cpu for _, cpu in runs]
        every = ", ".join(f"{wall:.1f}" for wall in walls)
        rows.append([side, median(walls), every, tokens / median(walls), median(cpus)])
    wall = median([one for one, _ in ours]) / median([one for one, _ in theirs])
    cpu = median([one for _, one in ours]) / median([one for _, one in theirs])
    publish(
        Result(
            name="peer",
            title=f"Against the peer: speculators 0.9.0 on the same vLLM 0.32 (CPU), {samples} samples, {tokens:,} tokens",
            command="python -m benchmarks.peer",
            columns=("side", "wall s (median)", "all runs", "tok/s", "client CPU s (median)"),
            rows=rows,
            goals={"wall, ours / theirs (goal <= 1.0)": f"{wall:.2f}", "client CPU, ours / theirs (goal <= 0.5)": f"{cpu:.2f}"},
            notes=[
                "whole commands, start-up included; ours also runs its preflight, plans, checks content, syncs and extracts again"
            ],
        )
    )


def _speculators() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "drafter-data" / "trainers" / "bin" / "speculators"


def _peer_dataset(dataset: Dataset, out: Path) -> None:
    """The same rows in the form that it reads."""
    import datasets

    rows = list(dataset.samples())
    columns = {
        "input_ids": [row.input_ids_s.tolist() for row in rows],
        "loss_mask": [row.loss_mask_s.tolist() for row in rows],
        "seq_len": [row.tokens for row in rows],
    }
    datasets.Dataset.from_dict(columns).with_format("torch").save_to_disk(out)


def _theirs(program: Path, running: Running, work: Path, repeat: int, samples: int) -> tuple[float, float]:
    out = work / f"peer-{repeat}"
    command = [str(program), "generate-offline-data", "--endpoint", f"{running.url}/v1", "--preprocessed-data"]
    command += [str(work / "peer-dataset"), "--output", str(out), "--concurrency", str(IN_FLIGHT), "--validate-outputs"]
    figures = _timed(command, {"HF_HUB_OFFLINE": "1"})
    found = len(list(out.glob("hs_*.safetensors")))
    if found != samples:
        raise RuntimeError(f"the peer left {found} files, expected {samples}")
    return figures


def _ours(running: Running, dataset: Path, store: Path) -> tuple[float, float]:
    command = [sys.executable, "-m", "drafter_data", "extract", str(dataset), "--store", str(store), "--url", running.url]
    command += ["--kind", "vllm", "--model", str(running.configuration.model), "--dump-folder", str(running.dump_folder)]
    command += ["--layers", *map(str, running.configuration.layers or ()), "--in-flight", str(IN_FLIGHT), "--json"]
    return _timed(command, {})


def _timed(command: list[str], env: dict[str, str]) -> tuple[float, float]:
    """Wall and CPU seconds. Raises RuntimeError when it fails."""
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **env})
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} ended with {process.returncode}: {output[-3000:].decode(errors='replace')}")
    return time.monotonic() - started, usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
