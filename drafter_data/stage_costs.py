"""How long the stages after the extraction take: validation and hand-off, by the bytes that they go through.

Kept in STORE/stages.json, so that a forecast counts them as well. Before the first run of a stage on a store a cautious rate
stands in.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from data_contracts.forecast import StageForecast
from data_contracts.record import Record
from drafter_data.files import write_atomic

STAGES_FILE = "stages.json"
FOLLOWING = ("validate", "hand-off")
ASSUMED_BYTES_PER_SECOND = 0.3e9
"""A cold read from a plain disk with checks (benchmarks/results.md, validation): what a first forecast assumes."""
KEPT_RUNS = 8
LEAST_SECONDS = 0.5
"""A shorter run says what a start costs, not what a byte does."""


class StageRun(Record):
    """One run of a stage: the bytes it went through, and its wall seconds."""

    stage: str
    bytes: int
    seconds: float


class StageHistory(Record):
    """The newest runs of each stage."""

    version: int = 1
    runs: tuple[StageRun, ...] = ()


def load_stages(store_root: Path) -> StageHistory:
    """The kept history; an empty one where there is none or it cannot be read, since it only serves an estimate."""
    try:
        return StageHistory.model_validate_json((store_root / STAGES_FILE).read_bytes())
    except (OSError, ValidationError):
        return StageHistory()


def observe_stage(store_root: Path, stage: str, size: int, seconds: float) -> None:
    """Keeps how long a stage took over `size` bytes. Raises OSError."""
    if seconds < LEAST_SECONDS or size <= 0:
        return
    runs = load_stages(store_root).runs
    same = [run for run in runs if run.stage == stage][-KEPT_RUNS + 1 :]
    others = [run for run in runs if run.stage != stage]
    kept = (*others, *same, StageRun(stage=stage, bytes=size, seconds=seconds))
    write_atomic(store_root / STAGES_FILE, StageHistory(runs=kept).model_dump_json())


def following_stages(store_root: Path, size: int) -> tuple[StageForecast, ...]:
    """Wall seconds of each stage after the extraction, over `size` bytes: the newest runs' bytes and seconds, summed."""
    history = load_stages(store_root)
    found: list[StageForecast] = []
    for stage in FOLLOWING:
        runs = [run for run in history.runs if run.stage == stage]
        rate = sum(run.bytes for run in runs) / sum(run.seconds for run in runs) if runs else ASSUMED_BYTES_PER_SECOND
        found.append(StageForecast(stage=stage, seconds=size / rate, runs=len(runs)))
    return tuple(found)
