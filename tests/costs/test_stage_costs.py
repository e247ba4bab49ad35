"""What follows the extraction counts in the forecast, from the runs before."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafter_data.stage_costs import ASSUMED_BYTES_PER_SECOND, STAGES_FILE, following_stages, observe_stage


def test_stages_without_a_run_are_assumed_and_say_so(tmp_path: Path) -> None:
    found = following_stages(tmp_path, 6_000_000_000)
    assert [(one.stage, one.runs) for one in found] == [("validate", 0), ("hand-off", 0)]
    assert all(one.seconds == pytest.approx(6e9 / ASSUMED_BYTES_PER_SECOND) for one in found)


def test_stages_that_ran_are_forecast_by_their_own_rate(tmp_path: Path) -> None:
    observe_stage(tmp_path, "validate", 1_000_000_000, 2.0)
    observe_stage(tmp_path, "validate", 3_000_000_000, 2.0)
    observe_stage(tmp_path, "hand-off", 5_000_000, 0.01)  # too short to say anything
    validate, handoff = following_stages(tmp_path, 4_000_000_000)
    assert (validate.seconds, validate.runs) == (pytest.approx(4.0), 2)
    assert handoff.runs == 0


def test_an_unreadable_history_only_costs_the_estimate(tmp_path: Path) -> None:
    (tmp_path / STAGES_FILE).write_text("{")
    observe_stage(tmp_path, "validate", 1_000_000_000, 1.0)
    assert following_stages(tmp_path, 2_000_000_000)[0].seconds == pytest.approx(2.0)
