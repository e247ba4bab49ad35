"""Probes of an engine without a history: their cost, what they keep to, and what the forecast before the first chunk is worth."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.world import RAM_DISK, make_dataset, timed_engine, work_folder
from data_contracts.parameters import ExtractionParameters
from data_contracts.preflight import PreflightReport
from drafter_data import probing
from drafter_data.canary import PROMPT_TOKENS
from drafter_data.costs import CostHistory, CostModel, CostWindow, costs_path
from drafter_data.dataset import Dataset
from drafter_data.engines.base import Engine, EngineInfo, PrefillReply, PrefillRequest
from drafter_data.engines.connect import connect
from drafter_data.errors import DumpMissing, PreflightRefused
from drafter_data.extraction.campaign import check_engine, extract_all, pending_chunks, plan_over
from drafter_data.extraction.session import SessionSettings, shared_session
from drafter_data.planning import missing_samples
from drafter_data.preflight import PROBE_QUANTILES, run_preflight
from drafter_data.probing import MOST_ASKED_AGAIN, burst_lengths
from tests.support.datasets import random_prompts, write_dataset
from tests.support.engines import RunningEngine, running_engine

ONE_LENGTH_APART = ("--dumps", "unlabelled", "--prefill-max-requests", "1", "--chunked-prefill-size", "-1")


def _never(seen: list[list[int]]) -> None:
    del seen


class Watched:
    """An engine, beside which is written down what is open at each sending; `fail` may raise in place of a request."""

    def __init__(self, engine: Engine, free_bytes: int | None = None) -> None:
        self._engine, self._free_bytes = engine, free_bytes
        self._lock = threading.Lock()
        self._open = list[int]()
        self.seen = list[list[int]]()
        self.interrupted = threading.Event()
        self.fail: Callable[[list[list[int]]], None] = _never

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def describe(self) -> EngineInfo:
        return replace(self._engine.describe(), fingerprint="watched")

    def interrupt(self) -> None:
        self.interrupted.set()
        self._engine.interrupt()

    def free_bytes(self) -> int:
        return self._engine.free_bytes() if self._free_bytes is None else self._free_bytes

    def send(self, request: PrefillRequest) -> PrefillReply:
        with self._lock:
            self._open.append(request.tokens)
            self.seen.append(list(self._open))
        try:
            self.fail(self.seen)
            time.sleep(0.02)  # so that those that may be open at once are
            return self._engine.send(request)
        finally:
            with self._lock:
                self._open.remove(request.tokens)

    def widest(self) -> int:
        """Most requests that were open at once, the canary's pair of short ones aside."""
        return max(len(one) for one in self.seen if set(one) != {PROMPT_TOKENS})


def probed(running: RunningEngine, dataset: Dataset, store: Path, in_flight: int, **limits: Any) -> tuple[Watched, PreflightReport]:
    kind = "sglang-unlabelled" if limits.pop("unlabelled", False) else "embedded"
    watched = Watched(connect(running.parameters(kind=kind), request_timeout_seconds=60), limits.pop("free_bytes", None))
    watched.fail = limits.pop("fail", watched.fail)
    limits.pop("made", lambda _: None)(watched)
    try:
        report = run_preflight(cast("Engine", watched), dataset, store, ExtractionParameters(in_flight=in_flight, **limits))
    finally:
        watched.close()
    return watched, report


def windows(store: Path) -> tuple[CostWindow, ...]:
    (path,) = (store / "costs").glob("*.json")
    return CostHistory.model_validate_json(path.read_bytes()).windows


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Enough prompts that a hundredth of their tokens holds a burst."""
    return write_dataset(tmp_path_factory.mktemp("many") / "dataset", random_prompts(2000, 16, 64, seed=11))


@pytest.mark.parametrize("in_flight", [2, 8, 32])
def test_burst_lengths_are_spread_like_those_to_come_within_a_hundredth_of_the_tokens(in_flight: int) -> None:
    lengths = np.random.default_rng(0).lognormal(6.0, 0.8, 20_000).clip(16, 8000).astype(int)
    spent = 8224
    burst = burst_lengths(lengths, in_flight, spent_tokens=spent)
    assert 4 <= len(burst) <= 4 * in_flight
    assert sum(burst) + spent <= 0.01 * lengths.sum()
    for share in (1.0, 0.5):
        assert np.mean(burst[: int(len(burst) * share)]) == pytest.approx(lengths.mean(), rel=0.25)


def test_burst_lengths_small_or_sequential_runs_have_none_and_huge_ones_are_bounded() -> None:
    lengths = np.full(1000, 500)
    assert burst_lengths(lengths, 32, spent_tokens=4000) == []
    assert burst_lengths(np.full(10**6, 500), 1, spent_tokens=0) == []
    assert sum(burst_lengths(np.full(10**6, 8000), 32, spent_tokens=0)) <= 200_000


def test_forecast_before_the_first_chunk_is_right_where_passes_batch(tmp_path: Path) -> None:
    """20 ms + 25 us a token a pass: prompts of 300 tokens take 28 ms one at a time and less than half of that with 8 in flight."""
    folder = make_dataset(tmp_path / "dataset", random_prompts(3000, 250, 350, seed=12))
    store, extraction, dataset = tmp_path / "store", ExtractionParameters(in_flight=8), Dataset.open(folder)
    log = tmp_path / "requests.jsonl"
    flags = ("--request-log", str(log))
    with work_folder(RAM_DISK) as ram, timed_engine(tmp_path, ram / "dumps", hidden_size=64, num_layers=8, flags=flags) as engine:
        found = check_engine(dataset, store, engine.parameters(), extraction, keep_free_bytes=0)
        sent = [json.loads(line)["tokens"] for line in log.read_text().splitlines()]
        costs, plan = CostModel.load(costs_path(store, found.fingerprint)), plan_over(dataset, store, extraction, found)
        settings = SessionSettings(
            dataset=folder, store=store, engine=engine.parameters(), extraction=extraction, in_flight=8,
            tolerance=found.canary.tolerance,
        )  # fmt: skip
        with shared_session(settings) as session:
            chunks = pending_chunks(plan, session.store)[:3]
            missing = missing_samples(session.store, plan)
            tokens_n = missing.tokens_n[np.isin(missing.chunk_n, chunks)]
            before = costs.forecast(tokens_n, in_flight=8, bytes_per_token=1)
            started = time.monotonic()
            extract_all(session, chunks)
            wall = time.monotonic() - started
    assert sum(sent) < 0.01 * dataset.record.tokens
    assert 0.7 < before.seconds / wall < 1.4, "one at a time it would be more than twice the time"
    assert before.low_seconds < wall < before.high_seconds
    assert (0.02 + 25e-6 * 300) * len(tokens_n) > 1.6 * wall, "passes must have batched"


def test_preflight_with_history_sends_no_burst(small_model: Path, many: Dataset, tmp_path: Path) -> None:
    with running_engine(small_model) as engine:
        first, told = probed(engine, many, tmp_path / "store", 8)
        again, silent = probed(engine, many, tmp_path / "store", 8)
        wider, _ = probed(engine, many, tmp_path / "store", 32)
    assert first.widest() > 1
    assert sum(one[-1] for one in first.seen) < 0.01 * many.record.tokens
    assert any("probes" in note for note in told.notes)
    assert (again.widest(), silent.notes) == (1, ())
    assert wider.widest() > 1, "a history of 8 in flight says little of 32"


@pytest.mark.parametrize("in_flight", [1, 3])
def test_burst_keeps_to_the_runs_number_in_flight(small_model: Path, many: Dataset, tmp_path: Path, in_flight: int) -> None:
    with running_engine(small_model) as engine:
        watched, _ = probed(engine, many, tmp_path / "store", in_flight)
    assert watched.widest() == in_flight
    assert {window.in_flight for window in windows(tmp_path / "store")} == {1, in_flight}


def test_burst_unlabelled_never_has_two_of_one_length_open(small_model: Path, tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "dataset", random_prompts(2500, 30, 33, seed=13))
    with running_engine(small_model, *ONE_LENGTH_APART) as engine:
        watched, report = probed(engine, dataset, tmp_path / "store", 16, unlabelled=True)
    assert report.lengths_must_differ
    assert 1 < watched.widest() <= 4
    assert all(len(set(one)) == len(one) for one in watched.seen)


def test_burst_keeps_to_half_of_the_dump_folders_free_bytes(small_model: Path, many: Dataset, tmp_path: Path) -> None:
    with running_engine(small_model) as engine:
        free = 6 * 64 * 4 * 64 * 4  # half of it: three of the longest prompts, four layers of 64 values
        watched, _ = probed(engine, many, tmp_path / "store", 16, free_bytes=free)
    most = max(sum(one) for one in watched.seen if set(one) != {PROMPT_TOKENS})
    assert 64 < most <= 3 * 64


def test_burst_probe_that_fails_once_is_asked_again_alone_and_its_burst_says_nothing(
    small_model: Path, many: Dataset, tmp_path: Path
) -> None:
    def fail_once(seen: list[list[int]]) -> None:
        if len(seen[-1]) == 4 and sum(len(one) == 4 for one in seen) == 1:
            raise DumpMissing("lost")

    with running_engine(small_model) as engine:
        _, report = probed(engine, many, tmp_path / "store", 4, fail=fail_once)
    assert any("had to be repeated" in note for note in report.notes)
    assert not any("probes" in note for note in report.notes)
    found = windows(tmp_path / "store")
    assert {window.in_flight for window in found} == {1}
    assert sum(window.requests for window in found) > 1, "one length says nothing of others"


def test_burst_whose_probes_all_fail_asks_few_of_them_again(small_model: Path, many: Dataset, tmp_path: Path) -> None:
    """Each is asked for alone: of a hundred, on a slow engine, that would take as long as the first chunk."""

    def fail_together(seen: list[list[int]]) -> None:
        if len(seen[-1]) > 2:
            raise DumpMissing("lost")

    with running_engine(small_model) as engine:
        watched, report = probed(engine, many, tmp_path / "store", 8, fail=fail_together)
    last_burst = max(place for place, one in enumerate(watched.seen) if len(one) > 1)
    assert sum(len(one) > 2 for one in watched.seen) > 8
    assert len(watched.seen) - last_burst - 1 <= MOST_ASKED_AGAIN + len(PROBE_QUANTILES)
    assert report.canary.requests == len(watched.seen)


def test_burst_sends_nothing_more_once_its_time_is_over(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one length only, unlabelled, all wait for each other: their turns come long after they began to wait."""
    dataset = write_dataset(tmp_path / "dataset", random_prompts(2500, 30, 30, seed=13))
    monkeypatch.setattr(probing, "MOST_SECONDS", 0.2)
    with running_engine(small_model, *ONE_LENGTH_APART) as engine:
        watched, _ = probed(engine, dataset, tmp_path / "store", 16, unlabelled=True)
    assert watched.widest() == 1
    assert len(watched.seen) < 20, "64 prompts were to be sent"


def test_interrupt_ends_a_burst_at_once(small_model: Path, many: Dataset, tmp_path: Path) -> None:
    """Its requests wait for the engine, up to their whole time limit, unless they are broken off."""
    engines = list[Watched]()

    def wait(seen: list[list[int]]) -> None:
        if len(seen[-1]) == 4:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        if len(seen[-1]) > 2:
            assert engines[0].interrupted.wait(20)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with running_engine(small_model) as engine:
            started = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                probed(engine, many, tmp_path / "store", 4, fail=wait, made=engines.append)
            assert time.monotonic() - started < 10
    finally:
        signal.signal(signal.SIGINT, before)
    assert not (tmp_path / "store").exists()


def test_burst_probe_that_fails_alone_as_well_refuses_and_writes_nothing(small_model: Path, many: Dataset, tmp_path: Path) -> None:
    def fail(seen: list[list[int]]) -> None:
        if any(len(one) == 4 for one in seen):
            raise DumpMissing("lost")

    with running_engine(small_model) as engine, pytest.raises(PreflightRefused) as refused:
        probed(engine, many, tmp_path / "store", 4, fail=fail)
    assert refused.value.reason == "canary-dump-missing"
    assert not (tmp_path / "store").exists()
