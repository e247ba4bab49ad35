"""The ETA on a real SGLang, beside the extrapolation of samples a second: a first campaign on an engine, then some with a history.

Each campaign's forecasts are taken every half second and judged at its end, when the remaining time of each is known. The plan
mixes lengths, so that the tokens a second of each fifth of a campaign tell how steady the host was.
"""

from __future__ import annotations

import argparse
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.real_engines import sglang
from benchmarks.reporting import Cell, Result, median, publish
from benchmarks.world import field_lengths, make_dataset, prompts_of, work_folder
from data_contracts.forecast import Forecast
from data_contracts.parameters import EngineParameters, ExtractionParameters
from drafter_data.costs import CostModel, costs_path
from drafter_data.dataset import Dataset
from drafter_data.extraction.campaign import check_engine, extract_all, pending_chunks, plan_over
from drafter_data.extraction.progress import Reporter, Snapshot
from drafter_data.extraction.session import SessionSettings, shared_session
from drafter_data.planning import missing_samples

COLUMNS = (
    "campaign", "wall s", "before: error", "from 5 %: median error", "90 % below", "interval covers", "samples/s: median",
    "pace by fifths",
)  # fmt: skip
LOOK_SECONDS = 0.5
FROM_SHARE, TO_SHARE = 0.05, 0.95
"""Below a twentieth of the work left the remaining seconds are few, and a relative error of them says nothing."""


@dataclass(frozen=True)
class Look:
    """A forecast in a running campaign: when, what share of the samples and tokens was done, and what was said."""

    at: float
    done: int
    share: float
    forecast: Forecast


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".run/bench"))
    parser.add_argument("--samples", type=int, default=1500)
    parser.add_argument("--campaigns", type=int, default=5)
    parser.add_argument("--mean-tokens", type=float, default=300.0)
    options = parser.parse_args()
    rows: list[list[Cell]] = []
    with work_folder(options.work) as work, sglang(work) as running:
        engine, costs = running.parameters(), work / "costs"
        for number in range(options.campaigns):
            prompts = prompts_of(field_lengths(options.samples, mean_tokens=options.mean_tokens, seed=number), seed=number)
            dataset, store = make_dataset(work / f"dataset-{number}", prompts), work / f"store-{number}"
            if number:
                shutil.copytree(costs, store / "costs")
            rows.append(["history" if number else "no history", *_judged(*_campaign(dataset, store, engine))])
            shutil.copytree(store / "costs", costs, dirs_exist_ok=True)
    first, during = ([float(str(row[place]).rstrip("%")) for row in rows] for place in (2, 3))
    publish(
        Result(
            name="eta_real",
            title="ETA on a real SGLang 0.5.23 on the CPU: error of the remaining time",
            command=f"python -m benchmarks.eta_real --campaigns {options.campaigns} --samples {options.samples} "
            f"--mean-tokens {options.mean_tokens:g}",
            columns=COLUMNS,
            rows=rows,
            goals={
                "error from 5 % on, median campaign and worst (goal < 5 %)": f"{median(during):.1f}%, {max(during):.1f}%",
                "error before the first chunk, median campaign and worst (goal < 15 %)": f"{median(first):.1f}%, {max(first):.1f}%",
            },
            notes=["the remaining time of a forecast is known at the campaign's end; a look every half second, from 5 % to 95 %"],
        )
    )


def _campaign(folder: Path, store: Path, engine: EngineParameters) -> tuple[Forecast, list[Look], float, float, int]:
    """Runs one; returns the forecast before, the looks, the clock at its beginning and end, and its samples."""
    dataset, extraction = Dataset.open(folder), ExtractionParameters(in_flight=32)
    found = check_engine(dataset, store, engine, extraction, keep_free_bytes=0)
    plan = plan_over(dataset, store, extraction, found)
    settings = SessionSettings(
        dataset=folder, store=store, engine=engine, extraction=extraction, in_flight=found.in_flight,
        tolerance=found.canary.tolerance,
    )  # fmt: skip
    looks: list[Look] = []

    def look(now: Snapshot) -> None:
        if now.forecast is not None:
            looks.append(Look(time.monotonic(), now.done, now.share, now.forecast))

    with shared_session(settings) as session:
        tokens = missing_samples(session.store, plan).tokens_n
        costs = CostModel.load(costs_path(store, found.fingerprint))
        before = costs.forecast(tokens, in_flight=found.first_in_flight, bytes_per_token=found.bytes_per_token)
        started = time.monotonic()
        reporter = Reporter(session.snapshot, look, LOOK_SECONDS)
        extract_all(session, pending_chunks(plan, session.store))
        ended = time.monotonic()
        reporter.close()
    return before, looks, started, ended, len(tokens)


def _judged(before: Forecast, looks: list[Look], started: float, ended: float, samples: int) -> list[Cell]:
    wall = ended - started
    fair = [one for one in looks if FROM_SHARE <= one.share <= TO_SHARE]
    left = np.array([ended - one.at for one in fair])
    said = np.array([one.forecast.seconds for one in fair])
    at_s = np.array([started, *(one.at for one in looks), ended])
    reached = np.interp(np.arange(6) / 5, np.array([0.0, *(one.share for one in looks), 1.0]), at_s)
    pace = wall / 5 / np.maximum(np.diff(reached), 1e-3)
    by_samples = np.array([(samples - one.done) * (one.at - started) / max(one.done, 1) for one in fair])
    errors = np.abs(said / left - 1)
    covered = np.mean([one.forecast.low_seconds <= rest <= one.forecast.high_seconds for one, rest in zip(fair, left, strict=True)])
    return [
        wall,
        f"{abs(before.seconds / wall - 1):.1%}",
        f"{np.median(errors):.1%}",
        f"{np.quantile(errors, 0.9):.1%}",
        f"{covered:.0%}",
        f"{np.median(np.abs(by_samples / left - 1)):.1%}",
        ", ".join(f"{one:.0%}" for one in pace),
    ]


if __name__ == "__main__":
    main()
