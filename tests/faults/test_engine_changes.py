"""An engine that gives other states from some moment on: each request agrees with the next, only not with those before."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from data_contracts.extraction import Recheck
from drafter_data.errors import EngineChanged
from drafter_data.extraction.rechecks import record_rechecks
from drafter_data.planning import load_plan
from drafter_data.store.store import Store
from drafter_data.validation import validate_store
from tests.faults.cells import Setting, bench
from tests.support.datasets import random_prompts, write_dataset

SAMPLES = 60


@pytest.mark.parametrize("labelled", [True, False], ids=["labelled", "unlabelled"])
def test_layers_that_shift_in_mid_run_stop_it_and_leave_nothing_wrong(small_model: Path, tmp_path: Path, labelled: bool) -> None:
    dataset = write_dataset(tmp_path / "dataset", random_prompts(SAMPLES, 20, 60, seed=41))
    with bench(Setting(labelled, 4), small_model, dataset, tmp_path / "bench") as made:
        made.set_faults({"name": "shifted-layer", "after": 48})
        store = made.new_store()
        with pytest.raises(EngineChanged, match="does not give the states any more"):
            made.extract(store, chunk_samples=10, recheck_samples=1)
        for thread in threading.enumerate():
            if thread.name.startswith("chunk"):
                thread.join(30)
        made.compare(store)
        assert made.wrong == 0
        assert 10 <= len(Store.open(store)) < SAMPLES, "what was compared before the change stays"
        made.set_faults()
        report = made.extract(store, chunk_samples=10, recheck_samples=1)
        assert (report.stored, report.failed) == (SAMPLES, 0)
        made.compare(store)
        assert made.wrong == 0
    again = validate_store(Store.open(store), dataset).rechecks
    assert again is not None
    assert (again.chunks, again.chunks_without, again.differing) == (6, 0, ())
    assert again.compared >= 11 and again.earlier >= 5
    assert 0 <= again.largest <= again.tolerance


def test_single_sample_whose_layers_were_shifted_is_taken_out_when_it_is_asked_again(small_model: Path, tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "dataset", random_prompts(20, 20, 60, seed=42))
    with bench(Setting(True, 4), small_model, dataset, tmp_path / "bench") as made:
        made.set_faults({"name": "shifted-layer", "rate": 0.4, "per_prompt": True, "attempts": 1})
        store = made.new_store()
        report = made.extract(store, recheck_samples=100)  # each is asked a second time
        assert (report.stored, report.failed) == (20, 0)
        made.compare(store)
        assert made.wrong == 0
        again = validate_store(Store.open(store), dataset).rechecks
        assert again is not None
        assert again.compared == 21, "all, and one from the beginning"
        named = {one.state_key for one in again.differing}
        assert 1 <= len(named) < 20, "those that were hit, unless they were unlike the others at once"
        assert named < {sample.state_key for sample in dataset.samples()}
        plan = load_plan(store, dataset.record.dataset_id)
        record_rechecks(store, plan.dataset_id, plan.chunks[0].key, [Recheck(state_key="f" * 40, distance=9.0, tolerance=1.0)])
        more = validate_store(Store.open(store), dataset).rechecks
        assert more is not None
        assert [one.state_key for one in more.differing if one.distance == 9.0] == ["f" * 40]
