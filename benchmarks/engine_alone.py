"""Against the engine alone: the pipeline's wall time over that of a bare load generator on the same engine and prompts, in one run.

The generator is swept over 1, 2, 4 ... 32 in flight, and the pipeline makes a first run over other prompts of such lengths, from
which it knows the engine as a campaign's second run does; then both sides alternate, and the ratio of the medians counts. The
embedded engine's timed mode leaves dumps at several shares of what `cp` + `sync` reaches on this disk just before.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reporting import Cell, Result, every, median, publish
from benchmarks.world import (
    RAM_DISK,
    copy_and_sync_rate,
    field_lengths,
    make_dataset,
    prompts_of,
    run_module,
    timed_engine,
    work_folder,
)
from data_contracts.parameters import EngineParameters

SWEEP = (1, 2, 4, 8, 16, 32)
LAYERS, BYTES = 4, 2
SGLANG_MOST_TOKENS = 3500
"""Its model's context is 4,096; lengths made distinct go some way beyond this."""
COLUMNS = ("dumps", "side", "in flight", "wall s (median)", "all runs", "tok/s", "client CPU s", "ratio")


@dataclass(frozen=True)
class Side:
    """An engine that both sides use."""

    label: str
    parameters: EngineParameters
    dump_folder: Path


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".run/bench"), help="a folder on the store's disk")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--mean-tokens", type=float, default=600.0)
    parser.add_argument("--first-samples", type=int, help="of the first run; as many as --samples unless said otherwise")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.1, 0.5], help="dump rates as shares of cp + sync")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--sglang", action="store_true", help="a real SGLang on the CPU instead")
    options = parser.parse_args()
    counts = (options.samples, options.first_samples or options.samples)
    if options.sglang:
        against_sglang(options.work, counts, options.mean_tokens, options.repeats)
        return
    rows: list[list[Cell]] = []
    goals: dict[str, str] = {}
    with work_folder(options.work) as work, work_folder(RAM_DISK) as ram:
        prompts, earlier = _prompts(counts, options.mean_tokens)
        disk = copy_and_sync_rate(work)
        for share in options.shares:
            hidden = hidden_size_for(share * disk, sum(map(len, prompts)) / len(prompts))
            dumps = ram / f"dumps-{share}"
            with timed_engine(work, dumps, hidden_size=hidden) as engine:
                side = Side(f"{share:.2f} x disk", engine.parameters(), dumps)
                ratio, found = compare(side, work / f"share-{share}", prompts, earlier, options.repeats)
            rows += found
            goals[f"pipeline / engine alone, dumps at {share:.2f} of cp + sync (goal <= 1.05)"] = f"{ratio:.3f}"
    publish(
        Result(
            name="engine_alone",
            title="Against the engine alone: embedded engine, timed mode (20 ms + 25 us a token, 8,192 tokens a pass)",
            command="python -m benchmarks.engine_alone",
            columns=COLUMNS,
            rows=rows,
            goals=goals,
            notes=[f"cp + sync of 4 x 64 MiB from the RAM disk just before: {disk / 1e6:,.0f} MB/s", SESSION_NOTE],
        )
    )


def against_sglang(parent: Path, counts: tuple[int, int], mean_tokens: float, repeats: int) -> None:
    """The same on a real SGLang. `counts`: samples that are compared, and those of the first run. One run of each side goes
    before, so that neither warms the engine up for the other.
    """
    from benchmarks.real_engines import sglang

    with work_folder(parent) as work:
        prompts, earlier = _prompts(counts, mean_tokens, most_tokens=SGLANG_MOST_TOKENS)
        with sglang(work) as running:
            side = Side("SGLang", running.parameters(), running.dump_folder)
            ratio, rows = compare(side, work / "runs", prompts, earlier, repeats)
    publish(
        Result(
            name=f"engine_alone_sglang_{mean_tokens:g}",
            title=f"Against the engine alone: SGLang 0.5.23 on the CPU, Llama of 8 layers, hidden size 128, float32, prompts of "
            f"{sum(map(len, prompts)) / len(prompts):,.0f} tokens",
            command=f"python -m benchmarks.engine_alone --sglang --samples {counts[0]} --first-samples {counts[1]} "
            f"--mean-tokens {mean_tokens:g}",
            columns=COLUMNS,
            rows=rows,
            goals={"pipeline / engine alone (goal <= 1.05)": f"{ratio:.3f}"},
            notes=[SESSION_NOTE],
        )
    )


SESSION_NOTE = (
    "the pipeline's wall time is from opening the session to its close: every state checked, durable and with its receipt, one "
    "sample a chunk extracted again and compared; its preflight and planning come before and are not in it"
)


def _prompts(counts: tuple[int, int], mean_tokens: float, **bounds: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts to be compared, and others for the first run."""
    lengths = [field_lengths(count, mean_tokens=mean_tokens, seed=seed, **bounds) for seed, count in enumerate(counts)]
    return prompts_of(lengths[0]), prompts_of(lengths[1], seed=1)


def hidden_size_for(bytes_per_second: float, mean_tokens: float) -> int:
    """The hidden size at which the timed law's full passes leave dumps at this rate."""
    samples_a_pass = max(1.0, 8192 / mean_tokens)
    tokens_a_pass = samples_a_pass * mean_tokens
    tokens_per_second = tokens_a_pass / (0.020 + 25e-6 * tokens_a_pass)
    return max(8, round(bytes_per_second / tokens_per_second / (LAYERS * BYTES)))


def compare(
    side: Side, work: Path, prompts: list[list[int]], earlier: list[list[int]], repeats: int, sweep: tuple[int, ...] = SWEEP
) -> tuple[float, list[list[Cell]]]:
    """Sweeps the generator, lets the pipeline run over the `earlier` prompts, then alternates both sides; returns the ratio of
    medians and rows of raw figures.
    """
    work.mkdir()
    dataset = make_dataset(work / "dataset", prompts)
    (work / "prompts.json").write_text(json.dumps(prompts))
    # The sweep runs on a part of the prompts: it only finds the best number in flight, the alternating runs measure it.
    (work / "some.json").write_text(json.dumps(prompts[:64]))
    rows: list[list[Cell]] = []
    rates: dict[int, float] = {}
    for in_flight in sweep:
        found = generate(side, work / "some.json", in_flight)
        rates[in_flight] = found["tokens"] / found["seconds"]
        rows.append([side.label, "generator, sweep", in_flight, found["seconds"], "", rates[in_flight], found["cpu_seconds"], ""])
    best = max(rates, key=lambda in_flight: rates[in_flight])
    costs = work / "costs"
    first = extract(side, make_dataset(work / "earlier", earlier), work / "store-first", costs=costs)
    alone, ours = list[dict[str, float]](), list[dict[str, float]]()
    for repeat in range(repeats):
        alone.append(generate(side, work / "prompts.json", best))
        ours.append(extract(side, dataset, work / f"store-{repeat}", costs=costs))
    ratio = median([one["seconds"] for one in ours]) / median([one["seconds"] for one in alone])
    tokens = sum(map(len, prompts))
    first_tokens = sum(map(len, earlier))
    rows.append(_row(side.label, "pipeline, first run", int(first["in_flight_at_end"]), [first], first_tokens, None))
    rows.append(_row(side.label, "generator, best", best, alone, tokens, None))
    rows.append(_row(side.label, "pipeline", int(ours[-1]["in_flight_at_end"]), ours, tokens, ratio))
    return ratio, rows


def generate(side: Side, prompts: Path, in_flight: int) -> dict[str, float]:
    """One run of the bare load generator."""
    return _floats(
        run_module(
            "benchmarks.load_generator", str(prompts), "--url", str(side.parameters.url), "--dump-folder", str(side.dump_folder),
            "--in-flight", str(in_flight),
        )
    )  # fmt: skip


def extract(side: Side, dataset: Path, store: Path, *options: str, costs: Path | None = None) -> dict[str, float]:
    """One run of the pipeline into a new store, which is removed. `costs`: a folder where the engine's history is kept."""
    if costs is not None and costs.is_dir():
        shutil.copytree(costs, store / "costs")
    found = _floats(
        run_module("benchmarks.pipeline", str(dataset), str(store), "--engine", side.parameters.model_dump_json(), *options)
    )
    if found["errors"]:
        raise RuntimeError(f"{found['errors']} samples failed")
    if costs is not None:
        shutil.copytree(store / "costs", costs, dirs_exist_ok=True)
    shutil.rmtree(store)
    return found


def _row(label: str, side: str, in_flight: int, runs: list[dict[str, float]], tokens: int, ratio: float | None) -> list[Cell]:
    runs_s = [one["seconds"] for one in runs]
    seconds, cpu = median(runs_s), median([one["cpu_seconds"] for one in runs])
    return [label, side, in_flight, seconds, every(runs_s), tokens / seconds, cpu, ratio]


def _floats(found: dict[str, object]) -> dict[str, float]:
    return {key: float(value) for key, value in found.items() if isinstance(value, (int, float))}


if __name__ == "__main__":
    main()
