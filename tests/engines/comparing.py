"""Runs an extraction against a real engine and compares every stored state with the reference.

Tensor legend: S tokens, L stored layers, H hidden size.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import requests

from data_contracts.extraction import GateReport
from data_contracts.identity import state_key
from data_contracts.parameters import EngineParameters, ExtractionParameters
from drafter_data.dataset import Dataset
from drafter_data.extraction.campaign import run_campaign
from drafter_data.safetensors_file import as_float32
from drafter_data.store.store import Store
from drafter_data.validation import validate_store
from tests.engines.reference import Reference
from tests.engines.servers import Running
from tests.support.datasets import random_prompts, write_dataset

NEAR_TIE = 1e-5
"""Of expert scores in 0..1: several times what two correct fp32 libraries differ by (3e-7 typically)."""
MOST_TRIES = 40


@dataclass(frozen=True)
class Errors:
    """Distances to the reference: largest absolute one, the same against the largest magnitude, relative Frobenius a column, and
    the largest relative Frobenius of a sample.
    """

    largest: float
    to_magnitude: float
    frobenius_l: tuple[float, ...]
    worst_sample: float


@contextmanager
def health_checks(running: Running, path: str = "/health_generate") -> Generator[list[int]]:
    """Ten health checks a second beside the run, as a load balancer sends them; yields their statuses."""
    stop, statuses = threading.Event(), list[int]()

    def check() -> None:
        while not stop.wait(0.1):
            try:
                statuses.append(running.get(path).status_code)
            except requests.RequestException:
                statuses.append(0)

    thread = threading.Thread(target=check)
    thread.start()
    try:
        yield statuses
    finally:
        stop.set()
        thread.join()


def prompts_of(count: int, low: int = 1, high: int = 2000, *, seed: int = 0) -> list[list[int]]:
    """Distinct prompts; the shortest and the longest length are among them, and two of one length."""
    prompts = random_prompts(count - 3, low, high, seed=seed, vocab_size=1020)
    ends = [random_prompts(1, length, length, seed=seed + k, vocab_size=1020)[0] for k, length in ((1, max(low, 2)), (2, high))]
    twin = random_prompts(1, len(prompts[0]), len(prompts[0]), seed=seed + 3, vocab_size=1020)[0]
    return [*prompts, *ends, twin]


def decided_prompts_of(
    count: int, low: int, high: int, reference: Reference, layers: tuple[int, ...], *, seed: int
) -> list[list[int]]:
    """`prompts_of`, of a model with experts only such in which no choice is a near-tie: rounding would decide it in any library."""
    return [
        _decided(ids, reference, layers, seed=1000 * seed + MOST_TRIES * at) if reference.has_experts else ids
        for at, ids in enumerate(prompts_of(count, low, high, seed=seed))
    ]


def _decided(ids: list[int], reference: Reference, layers: tuple[int, ...], *, seed: int) -> list[int]:
    """A prompt of this length without a near-tie."""
    for attempt in range(MOST_TRIES):
        reference.states(ids, layers)
        if reference.narrowest_choice >= NEAR_TIE:
            return ids
        (ids,) = random_prompts(1, len(ids), len(ids), seed=seed + attempt, vocab_size=1020)
    raise AssertionError(f"no prompt of {len(ids)} tokens without a near-tie")


def extract(
    folder: Path, prompts: Sequence[Sequence[int]], engine: EngineParameters, **extraction: Any
) -> tuple[GateReport, Dataset, Store]:
    """The whole extraction of a dataset of these prompts: preflight, plan, chunks, gate."""
    dataset = Dataset.open(folder / "dataset") if (folder / "dataset").exists() else write_dataset(folder / "dataset", prompts)
    settings = ExtractionParameters(**{"in_flight": 16, "chunk_samples": 50, "dump_timeout_seconds": 20, **extraction})
    report = run_campaign(dataset.folder, folder / "store", engine, settings)
    return report, dataset, Store.open(folder / "store")


def assert_complete(report: GateReport, dataset: Dataset, store: Store) -> None:
    """Every row of the dataset is stored and valid."""
    assert (report.failed, report.excluded, report.stored) == (0, 0, dataset.record.distinct_states), report
    found = validate_store(store, dataset)
    assert (found.errors, found.samples) == (0, dataset.record.rows), found.findings[:3]


def errors_of(store: Store, prompts: Sequence[Sequence[int]], reference: Reference) -> Errors:
    """Compares the stored state of each prompt with the reference."""
    layers = store.identity.layers
    squares_l, sizes_l = np.zeros(len(layers)), np.zeros(len(layers))
    largest = magnitude = worst = 0.0
    for ids in prompts:
        view = store.read(state_key(ids))
        found_slh = as_float32(view.states_slh, view.dtype)
        assert view.token_ids_s.tolist() == list(ids)
        expected_slh = reference.states(ids, layers)
        assert found_slh.shape == expected_slh.shape
        difference_slh = found_slh - expected_slh
        largest = max(largest, float(np.abs(difference_slh).max()))
        magnitude = max(magnitude, float(np.abs(expected_slh).max()))
        square_l, size_l = (
            np.square(difference_slh).sum((0, 2), dtype=np.float64),
            np.square(expected_slh).sum((0, 2), dtype=np.float64),
        )
        squares_l, sizes_l = squares_l + square_l, sizes_l + size_l
        worst = max(worst, float(np.sqrt(square_l.sum() / size_l.sum())))
    return Errors(largest, largest / magnitude, tuple(np.sqrt(squares_l / sizes_l).tolist()), worst)
