"""What Prefect costs: chunks of 200 samples as mapped tasks of a flow (logs, progress, retries) against the same without Prefect.

Both on the embedded engine's timed mode, in one run, taking turns, each in a process of its own. The flow's side talks to a Prefect
server that the process starts for itself; starting it is not counted, the stage that extracts is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

from benchmarks.engine_alone import Side, extract
from benchmarks.reporting import Result, median, publish
from benchmarks.world import RAM_DISK, field_lengths, make_dataset, prompts_of, timed_engine, work_folder
from data_contracts.parameters import EngineParameters, ExtractionParameters
from drafter_data.dataset import Dataset
from drafter_data.extraction.campaign import CHUNKS_AT_ONCE, check_engine, pending_chunks, plan_over
from drafter_data.extraction.session import SessionSettings
from drafter_data.store.store import Store


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".run/bench"), help="a folder on the store's disk")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--mean-tokens", type=float, default=800.0, help="the field's 2,353 make a chunk three times as long")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--flow", nargs=3, metavar=("DATASET", "STORE", "ENGINE"), help="used by the benchmark itself")
    options = parser.parse_args()
    if options.flow:
        sys.stdout.write(json.dumps(_flow_seconds(*options.flow)))
        return
    bare, flows = list[float](), list[float]()
    with work_folder(options.work) as work, work_folder(RAM_DISK) as ram:
        dataset = make_dataset(work / "dataset", prompts_of(field_lengths(200 * options.chunks, mean_tokens=options.mean_tokens)))
        with timed_engine(work, ram / "dumps", hidden_size=64) as engine:
            side = Side("", engine.parameters(), engine.dump_folder)
            for repeat in range(options.repeats):
                bare.append(extract(side, dataset, work / f"bare-{repeat}")["seconds"])
                flows.append(_in_flow(work, dataset, work / f"flow-{repeat}", engine.parameters()))
    share = 1 - median(bare) / median(flows)
    publish(
        Result(
            name="orchestration",
            title=f"What Prefect costs: {options.chunks} chunks of 200 samples of {options.mean_tokens:g} tokens (mean)",
            command="python -m benchmarks.orchestration",
            columns=("side", "wall s (median)", "all runs"),
            rows=[
                ["without Prefect", median(bare), ", ".join(f"{one:.2f}" for one in bare)],
                ["tasks of a flow", median(flows), ", ".join(f"{one:.2f}" for one in flows)],
            ],
            goals={"Prefect's share of the wall time (goal < 2 %)": f"{100 * share:.1f} %"},
        )
    )


def _in_flow(work: Path, dataset: Path, store: Path, engine: EngineParameters) -> float:
    env = {
        **os.environ,
        "PREFECT_HOME": str(work / "prefect"),
        "PREFECT_API_URL": "",
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    command = [sys.executable, "-m", "benchmarks.orchestration", "--flow", str(dataset), str(store), engine.model_dump_json()]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise RuntimeError(f"the flow's side failed: {done.stderr[-3000:]}")
    return float(done.stdout.strip().splitlines()[-1])


def _flow_seconds(dataset_folder: str, store_folder: str, engine_json: str) -> float:
    """Seconds of the extraction stage inside a flow run."""
    from prefect import flow
    from prefect.futures import PrefectFuture
    from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

    from tasks.extract import extract_chunks

    engine, extraction = EngineParameters.model_validate_json(engine_json), ExtractionParameters(in_flight=32)
    dataset, store_root = Dataset.open(Path(dataset_folder)), Path(store_folder)
    found = check_engine(dataset, store_root, engine, extraction, keep_free_bytes=0)
    plan = plan_over(dataset, store_root, extraction, found)
    store = Store.open(store_root)
    pending = [plan.chunks[index] for index in pending_chunks(plan, store)]
    store.close()
    settings = SessionSettings(
        dataset=dataset.folder, store=store_root, engine=engine, extraction=extraction, in_flight=found.in_flight,
        tolerance=found.canary.tolerance,
    )  # fmt: skip

    # The cast: Prefect's decorator names its runner's type invariantly.
    runner = cast("TaskRunner[PrefectFuture[Any]]", ThreadPoolTaskRunner(max_workers=CHUNKS_AT_ONCE))

    @flow(name="benchmark", task_runner=runner)
    def stage() -> float:
        started = time.monotonic()
        failures = extract_chunks(settings, pending, extraction)
        assert not failures, failures
        return time.monotonic() - started

    return float(stage())


if __name__ == "__main__":
    main()
