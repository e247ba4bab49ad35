"""Against the way that this work started from: one request at a time, then the folder is scanned for the dump of that many tokens.

Both sides on the embedded engine's timed mode (20 ms + 25 us a token a pass, at most 8,192 tokens a pass) with lengths like the
field's. The seed's way gets unlabelled dumps, as it expects them, reads the layers and saves one file a sample, unsynced and
unchecked. Where passes may batch, the law itself bounds what batching can bring: the bound stands in the table.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

import numpy as np
import requests

from benchmarks.engine_alone import Side, extract
from benchmarks.reporting import Cell, Result, median, publish
from benchmarks.world import RAM_DISK, field_lengths, make_dataset, prompts_of, timed_engine, work_folder
from drafter_data.safetensors_file import TensorFile

LAYERS = 4


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".run/bench"), help="a folder on the store's disk")
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument(
        "--hidden-sizes", type=int, nargs="*", default=[512], help="of dumps of 4 bf16 layers; the field's model has 7,168"
    )
    parser.add_argument("--mean-tokens", type=float, nargs="*", default=[2353.0, 300.0])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rows: list[list[Cell]] = []
    goals: dict[str, str] = {}
    with work_folder(options.work) as work, work_folder(RAM_DISK) as ram:
        for hidden in options.hidden_sizes:
            for mean in options.mean_tokens:
                prompts = prompts_of(field_lengths(options.samples, mean_tokens=mean))
                folder = work / f"{hidden}-{mean}"
                folder.mkdir()
                seed, ours = _compare(folder, ram, prompts, hidden, options.repeats)
                bound = _law(prompts, alone=True) / _law(prompts, alone=False)
                rows.append(
                    [
                        mean,
                        hidden,
                        len(prompts),
                        seed,
                        ours,
                        _law(prompts, alone=True),
                        _law(prompts, alone=False),
                        bound,
                        seed / ours,
                    ]
                )
                goals[f"seed's way / pipeline, mean {mean:,.0f} tokens, hidden {hidden} (goal >= 3)"] = (
                    f"{seed / ours:.2f}; by the law alone batching brings at most {bound:.2f}"
                )
    publish(
        Result(
            name="seed_way",
            title="Against the seed's way: one request at a time, scan the folder for the token count",
            command="python -m benchmarks.seed_way",
            columns=(
                "mean tokens",
                "hidden",
                "samples",
                "seed's way s",
                "pipeline s",
                "law, one at a time s",
                "law, full passes s",
                "law's bound",
                "ratio",
            ),
            rows=rows,
            goals=goals,
            notes=["the pipeline's states are checked, durable and received; the seed's way checks and syncs nothing"],
        )
    )


def _compare(work: Path, ram: Path, prompts: list[list[int]], hidden: int, repeats: int) -> tuple[float, float]:
    dataset = make_dataset(work / "dataset", prompts)
    seeds, ours = list[float](), list[float]()
    unlabelled, labelled = ram / "unlabelled", ram / "labelled"
    flags = ["--dumps", "unlabelled"]
    with (
        timed_engine(work, unlabelled, hidden_size=hidden, flags=flags) as old,
        timed_engine(work, labelled, hidden_size=hidden) as new,
    ):
        side = Side("", new.parameters(), labelled)
        for repeat in range(repeats):
            seeds.append(seed_way(old.url, unlabelled, prompts, work / f"seed-{repeat}"))
            ours.append(extract(side, dataset, work / f"store-{repeat}")["seconds"])
    shutil.rmtree(unlabelled)
    shutil.rmtree(labelled)
    return median(seeds), median(ours)


def seed_way(url: str, dump_folder: Path, prompts: list[list[int]], out: Path) -> float:
    """Seconds that it takes, one request after another."""
    out.mkdir()
    session = requests.Session()
    started = time.monotonic()
    for number, ids in enumerate(prompts):
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        reply = session.post(f"{url}/generate", json=body, timeout=600)
        reply.raise_for_status()
        found = _scan(dump_folder, len(ids))
        with (out / f"{number}.bin").open("wb") as handle:
            for layer in sorted(found.glob("layer_*.safetensors")):
                with TensorFile.open(layer) as file:
                    np.array(file.array("hidden_states")).tofile(handle)
        shutil.rmtree(found)
    return time.monotonic() - started


def _scan(dump_folder: Path, tokens: int) -> Path:
    """The dump of that many tokens: every dump's meta.json is read, again and again until one fits."""
    while True:
        for folder in dump_folder.glob("req_*"):
            meta = folder / "meta.json"
            if meta.is_file() and json.loads(meta.read_bytes())["num_tokens"] == tokens:
                return folder
        time.sleep(0.01)


def _law(prompts: list[list[int]], *, alone: bool) -> float:
    """Seconds by the timed mode's law alone: each prompt a pass of its own, or passes of 8,192 tokens."""
    tokens = sum(map(len, prompts))
    passes = len(prompts) if alone else tokens / 8192
    return 0.020 * passes + 25e-6 * tokens


if __name__ == "__main__":
    main()
