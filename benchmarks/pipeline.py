"""The pipeline's side of the comparisons: an extraction in a process of its own, with the time and CPU of each phase.

Prints {"start_seconds" (imports), "preflight_seconds", "plan_seconds", "seconds" (session opened, everything extracted, session
closed), "cpu_seconds" (of the latter), "total_cpu_seconds", "samples", "peak_rss_mb"}.
"""

from __future__ import annotations

import time

_STARTED = time.monotonic()

import argparse  # noqa: E402 - the clock starts before the imports that it measures
import json  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

from benchmarks.reporting import peak_rss_mb  # noqa: E402
from data_contracts.parameters import EngineParameters, ExtractionParameters  # noqa: E402
from drafter_data.dataset import Dataset  # noqa: E402
from drafter_data.extraction.campaign import check_engine, extract_all, pending_chunks, plan_over  # noqa: E402
from drafter_data.extraction.session import SessionSettings, shared_session  # noqa: E402


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("store", type=Path)
    parser.add_argument("--engine", required=True, help="EngineParameters as JSON")
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--chunk-samples", type=int, default=200)
    options = parser.parse_args()
    engine = EngineParameters.model_validate_json(options.engine)
    extraction = ExtractionParameters(in_flight=options.in_flight, chunk_samples=options.chunk_samples)
    at = [time.monotonic()]
    dataset = Dataset.open(options.dataset)
    found = check_engine(dataset, options.store, engine, extraction, keep_free_bytes=0)
    at.append(time.monotonic())
    plan = plan_over(dataset, options.store, extraction, found)
    at.append(time.monotonic())
    cpu = time.process_time()
    settings = SessionSettings(
        dataset=options.dataset, store=options.store, engine=engine, extraction=extraction, in_flight=found.in_flight,
        tolerance=found.canary.tolerance,
    )  # fmt: skip
    with shared_session(settings) as session:
        extract_all(session, pending_chunks(plan, session.store))
        done, errors, window = len(session.store), session.progress.errors, session.window.limit
    at.append(time.monotonic())
    result = {
        "start_seconds": at[0] - _STARTED,
        "preflight_seconds": at[1] - at[0],
        "plan_seconds": at[2] - at[1],
        "seconds": at[3] - at[2],
        "cpu_seconds": time.process_time() - cpu,
        "total_cpu_seconds": time.process_time(),
        "samples": done,
        "errors": errors,
        "in_flight_at_end": window,
        "peak_rss_mb": peak_rss_mb(),
    }
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main()
