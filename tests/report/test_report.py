"""Pictures are PNGs of the right contents and of small size; histories stay bounded and tell the truth; text stays one cell."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from data_contracts.forecast import Forecast
from data_contracts.handoff import TrainingPoint
from data_contracts.lengths import LengthGroup, LengthProfile
from data_contracts.receipt import Receipt
from data_contracts.status import ChunkStatus
from data_contracts.validation import LayerStatistics
from drafter_data.extraction.progress import Snapshot
from drafter_data.report import pictures
from drafter_data.report.chunks import STATES, grid_lines, states_of
from drafter_data.report.drawing import BLUE, GREEN, RED, embedded
from drafter_data.report.history import MOST_POINTS, NOTHING_YET, Track, history_of_receipts
from drafter_data.report.seldom import Seldom
from drafter_data.report.text import bar, markdown_table, sparkline
from drafter_data.trainers.curve import MOST_POINTS as MOST_TRAINING_POINTS
from drafter_data.trainers.curve import Curve

LARGEST_PNG_BYTES = 60_000
RATE = 1000.0


def snapshot(second: float, *, total: int = 1_000_000) -> Snapshot:
    """A run at RATE tokens a second."""
    done = int(second * RATE)
    left = (total - done) / RATE
    forecast = Forecast(seconds=left, low_seconds=0.9 * left, high_seconds=1.1 * left, bytes=1, samples=1, tokens=1)
    return Snapshot(done, 1000, done, total, 1.0, RATE, 0.1, 2, 1, 2, 0, 4, second, forecast)


def receipt(second: float, tokens: int, chunk: str = "c") -> Receipt:
    return Receipt(
        state_key="0" * 40, tokens=tokens, shape=(tokens, 4, 8), dtype="F32", bytes=1, xxh3="0" * 32, proof="label",
        chunk=chunk, committed_at=second,
    )  # fmt: skip


def colours_of(png: bytes) -> set[tuple[int, ...]]:
    image = Image.open(io.BytesIO(png)).convert("RGB")
    return {colour for _, colour in image.getcolors(1 << 24) or []}


def near(colour: str, found: set[tuple[int, ...]]) -> bool:
    wanted = [int(colour[k : k + 2], 16) for k in (1, 3, 5)]
    return any(max(abs(a - b) for a, b in zip(wanted, one, strict=True)) <= 8 for one in found)


def test_track_of_a_long_run_stays_bounded_and_keeps_its_rate_and_both_ends() -> None:
    track = Track()
    for second in range(0, 50_000, 5):
        track.take(snapshot(second, total=100_000_000))
    history = track.history()
    assert MOST_POINTS / 2 <= len(history.elapsed_n) <= MOST_POINTS + 1
    assert (history.elapsed_n[0], history.elapsed_n[-1]) == (0, 49_995)
    assert history.rate_n[1:] == pytest.approx(RATE, rel=0.01)
    assert history.share_n[-1] == pytest.approx(0.49995, abs=1e-4)
    assert history.first is not None and history.first.seconds == 100_000
    assert history.errors == 2


def test_history_of_receipts_counts_what_was_stored_before_as_done_not_as_rate() -> None:
    told = [receipt(100.0 + k, 50) for k in range(100)] + [receipt(1000.0 + k, 10) for k in range(41)]
    history = history_of_receipts(told, 10_820, since=900.0)
    assert history is not None
    assert history.share_n[0] == pytest.approx(5000 / 10_820)
    assert history.share_n[-1] == pytest.approx(5410 / 10_820)
    assert history.rate_n[1:] == pytest.approx(10.0, rel=0.26)  # 41 receipts in 40 s
    assert float(np.sum(history.rate_n[1:] * np.diff(history.elapsed_n))) == pytest.approx(410)
    assert history_of_receipts(told, 10_820, since=5000.0) is None


def test_extraction_picture_of_5000_chunks_is_small_and_shows_each_state() -> None:
    states = [STATES[k % len(STATES)] for k in range(5000)]
    track = Track()
    for second in range(0, 400, 5):
        track.take(snapshot(second))
    png = pictures.extraction_picture(track.history(), states)
    assert len(png) < LARGEST_PNG_BYTES
    few = colours_of(pictures.extraction_picture(track.history(), ["stored", "failed"]))
    assert near(GREEN, few) and near(RED, few)
    assert not near(RED, colours_of(pictures.extraction_picture(track.history(), ["stored", "waiting"])))
    assert pictures.extraction_picture(NOTHING_YET, [])


def test_lengths_norms_and_training_pictures_are_small_pngs_also_of_next_to_nothing() -> None:
    names = ("min", "p10", "p25", "p50", "p75", "p90", "p99", "max")
    at = {name: 5 * (k + 1) for k, name in enumerate(names)}
    group = LengthGroup(run="r" * 80, samples=1, tokens=5, supervised_tokens=1, quantiles_tokens=at)
    lower = (4, 8, 16, 32)
    profile = LengthProfile(dataset_id="d", groups=(group,) * 50, histogram_lower_tokens=lower, histogram_samples=(1,) * 4)
    empty = LengthProfile(dataset_id="d", groups=(), histogram_lower_tokens=(), histogram_samples=())
    flat = LayerStatistics(layer="2", rms_p01=0.0, rms_p50=0.0, rms_p99=0.0)
    wide = LayerStatistics(layer="8", rms_p01=1.0, rms_p50=50.0, rms_p99=90.0, ratio_over_run=(1.0, 1.1))
    points = [TrainingPoint(step=k, loss=float("nan") if k == 3 else 1.0 / (k + 1), accuracy=None) for k in range(5)]
    for png in (
        pictures.lengths_picture(profile),
        pictures.lengths_picture(empty),
        pictures.norms_picture([flat]),
        pictures.norms_picture([wide, wide]),
        pictures.training_picture(points),
        pictures.training_picture(points[3:4]),
    ):
        assert Image.open(io.BytesIO(png)).format == "PNG"
        assert len(png) < LARGEST_PNG_BYTES
    assert near(BLUE, colours_of(pictures.lengths_picture(profile)))
    shown = re.fullmatch(r"!\[lengths\]\(data:image/png;base64,(.*)\)", embedded(png, "lengths"))
    assert shown is not None and base64.b64decode(shown[1]) == png


def test_chunk_states_say_what_matters_first() -> None:
    def chunk(done: int, *, holder: str = "", failed: int = 0) -> ChunkStatus:
        return ChunkStatus(index=0, key="k", samples=10, done=done, missing_tokens=0, holder=holder, failed=failed)

    chunks = [chunk(10, failed=1), chunk(3, holder="h", failed=1), chunk(3, failed=1), chunk(3), chunk(0)]
    assert states_of(chunks) == ["stored", "at work", "failed", "partly", "waiting"]
    rows = grid_lines(states_of(chunks * 3), width=10)
    assert [len(row) for row in rows[:2]] == [10, 5]
    assert "X failed" in rows[-1]
    assert grid_lines([]) == []


def test_curve_of_a_restarted_job_begins_anew_and_stays_bounded() -> None:
    curve = Curve()
    for step in range(10_000):
        curve.take(TrainingPoint(step=step, loss=1.0))
    assert len(curve.points()) <= MOST_TRAINING_POINTS + 1
    assert (curve.points()[0].step, curve.points()[-1].step) == (0, 9999)
    curve.take(TrainingPoint(step=1, loss=2.0))
    assert [point.step for point in curve.points()] == [1]


def test_seldom_leaves_a_hundred_times_as_long_as_the_costly_thing_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("drafter_data.report.seldom.time.monotonic", lambda: now[0])
    seldom = Seldom(least_seconds=10)
    assert seldom.due()
    with seldom.measured():
        now[0] += 0.5
    now[0] += 49.9
    assert not seldom.due()
    now[0] += 0.2
    assert seldom.due()


def test_text_pictures_and_tables() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([]) == "" and sparkline([5.0, 5.0]) == "▁▁"
    assert len(sparkline(np.arange(10_000.0), width=50)) == 50
    assert (bar(0.5, 4), bar(2.0, 3), bar(-1, 3)) == ("██░░", "███", "░░░")
    table = markdown_table([{"a|b": "x\n| y <img>", "n": 1234}])
    assert table.splitlines() == ["| a\\|b | n |", "| --- | ---: |", "| x \\| y &lt;img> | 1,234 |"]
    assert markdown_table([]) == ""
