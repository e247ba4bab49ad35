"""A million samples: what the client holds and how long it takes, before and in the middle of a campaign."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.memory import LEFT, plan_and_resume

SAMPLES = 1_000_000


@pytest.mark.large
@pytest.mark.timeout(900)
def test_a_million_samples_are_planned_in_a_minute_and_resumed_in_half_a_gigabyte(tmp_path: Path) -> None:
    planned, resumed = plan_and_resume(tmp_path, SAMPLES)
    print(f"planned {planned}, resumed {resumed}")
    assert planned["chunks"] >= SAMPLES // 200
    assert planned["plan_seconds"] < 60
    assert resumed["extracted"] == LEFT
    assert max(planned["peak_rss_mb"], resumed["peak_rss_mb"]) < 500
