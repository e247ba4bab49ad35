"""A whole extraction against a real embedded engine: nothing wrong, nothing lost, whatever lies beside the dumps."""

from __future__ import annotations

import errno
import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.world import RAM_DISK, timed_engine, work_folder
from data_contracts.dump import FILE_PREFIX
from data_contracts.parameters import EngineParameters, ExtractionParameters
from drafter_data.claiming.folder import DumpFolder
from drafter_data.costs import CostModel, CostWindow, FoundInFlight, costs_path
from drafter_data.dataset import Dataset
from drafter_data.errors import DumpRejected, StoreError
from drafter_data.extraction import tuning
from drafter_data.extraction.campaign import check_engine, extract_all, pending_chunks, plan_over, run_campaign
from drafter_data.extraction.chunk import extract_chunk
from drafter_data.extraction.session import SessionSettings, shared_session
from drafter_data.extraction.tuning import InFlightTuner
from drafter_data.safetensors_file import TensorFile
from drafter_data.store.group_commit import GroupCommit
from drafter_data.store.store import Store
from drafter_data.validation import validate_store
from tests.support.datasets import random_prompts, write_dataset
from tests.support.engines import health_checks, running_engine
from tests.support.reference import ReferenceModel

LAYERS = (2, 4, 5, 8)


def worst_error(store_root: Path, dataset: Dataset, model: Path) -> float:
    """Largest difference between any committed state and transformers' over the whole dataset."""
    reference, store, worst = ReferenceModel(model), Store.open(store_root), 0.0
    for sample in dataset.samples():
        found = store.read(sample.state_key)
        expected_slh = reference.states(sample.input_ids_s.tolist(), LAYERS)
        assert found.states_slh.shape == expected_slh.shape
        worst = max(worst, float(np.abs(found.states_slh - expected_slh).max()))
    return worst


def planned(
    dataset: Dataset, store: Path, engine: EngineParameters, extraction: ExtractionParameters
) -> tuple[SessionSettings, list[int]]:
    """Preflight and plan over a new store: the settings of its session, and its chunks."""
    found = check_engine(dataset, store, engine, extraction, keep_free_bytes=0)
    plan = plan_over(dataset, store, extraction, found)
    settings = SessionSettings(dataset.folder, store, engine, extraction, found.in_flight, found.canary.tolerance)
    return settings, [chunk.index for chunk in plan.chunks]


def test_extraction_labelled_with_equal_lengths_in_flight_stores_every_state(small_model: Path, tmp_path: Path) -> None:
    prompts = random_prompts(120, 8, 200, seed=1) + random_prompts(40, 64, 64, seed=2)
    dataset = write_dataset(tmp_path / "dataset", prompts)
    with running_engine(small_model) as engine, health_checks(engine.url):
        report = run_campaign(dataset.folder, tmp_path / "store", engine.parameters(), ExtractionParameters(chunk_samples=40))
        left = [name for name in engine.dump_folder.iterdir() if not name.name.startswith(".")]
    assert (report.stored, report.failed) == (160, 0)
    assert left == []
    assert worst_error(tmp_path / "store", dataset, small_model) < 1e-4
    checked = validate_store(Store.open(tmp_path / "store"), dataset)
    assert (checked.errors, checked.samples, checked.orphans) == (0, 160, 0)


def test_extraction_chunked_prefill_puts_pieces_together(small_model: Path, tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "dataset", random_prompts(20, 100, 500, seed=3))
    with running_engine(small_model, "--chunked-prefill-size", "128") as engine:
        report = run_campaign(dataset.folder, tmp_path / "store", engine.parameters(), ExtractionParameters())
    assert (report.stored, report.failed) == (20, 0)
    assert worst_error(tmp_path / "store", dataset, small_model) < 1e-4


@pytest.mark.timeout(280)
def test_extraction_unlabelled_2000_samples_16_in_flight_beside_health_checks_none_wrong(small_model: Path, tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "dataset", random_prompts(2000, 8, 512, seed=4))
    flags = ("--dumps", "unlabelled", "--prefill-max-requests", "1", "--chunked-prefill-size", "-1")
    with running_engine(small_model, *flags) as engine, health_checks(engine.url) as seen:
        parameters = engine.parameters(kind="sglang-unlabelled")
        report = run_campaign(dataset.folder, tmp_path / "store", parameters, ExtractionParameters(in_flight=16))
    assert (report.stored, report.failed) == (2000, 0)
    assert len(seen) > 20, "the health checks must have run beside the extraction"
    assert worst_error(tmp_path / "store", dataset, small_model) < 1e-4
    proofs = Counter(receipt.proof for receipt in Store.open(tmp_path / "store").receipts())
    assert proofs == {"token-count+logprobs": 2000}


def test_preflight_unlabelled_mixed_passes_allows_one_in_flight_and_stays_right(small_model: Path, tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "dataset", random_prompts(40, 8, 200, seed=5))
    with running_engine(small_model, "--dumps", "unlabelled") as engine, health_checks(engine.url):
        parameters, extraction = engine.parameters(kind="sglang-unlabelled"), ExtractionParameters(in_flight=16)
        found = check_engine(dataset, tmp_path / "store", parameters, extraction, keep_free_bytes=0)
        assert found.in_flight == 1
        assert any("--prefill-max-requests 1" in note for note in found.notes)
        report = run_campaign(dataset.folder, tmp_path / "store", parameters, extraction)
    assert (report.stored, report.failed) == (40, 0)
    assert worst_error(tmp_path / "store", dataset, small_model) < 1e-4


def test_counter_prediction_beside_health_checks_goes_wrong(small_model: Path, tmp_path: Path) -> None:
    """The trap is real: the way that teams used, dump number = first number + position, names other requests' dumps."""
    import requests

    prompts = random_prompts(60, 8, 64, seed=6)
    flags = ("--dumps", "unlabelled", "--prefill-max-requests", "1")
    with running_engine(small_model, *flags) as engine, health_checks(engine.url):
        first = max(int(folder.name.removeprefix("req_")) for folder in engine.dump_folder.glob("req_*")) + 1
        for ids in prompts:
            body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
            assert requests.post(f"{engine.url}/generate", json=body, timeout=60).status_code == 200
        wrong = 0
        for position, ids in enumerate(prompts):
            meta = json.loads((engine.dump_folder / f"req_{first + position:08d}" / "meta.json").read_text())
            wrong += meta["num_tokens"] != len(ids)
    assert wrong > 10


def test_extraction_again_sends_nothing(small_model: Path, tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "dataset", random_prompts(30, 8, 64, seed=7))
    with running_engine(small_model) as engine:
        run_campaign(dataset.folder, tmp_path / "store", engine.parameters(), ExtractionParameters(chunk_samples=10))
        keys = {receipt.state_key: receipt.xxh3 for receipt in Store.open(tmp_path / "store").receipts()}
        sent = len(engine.request_log.read_text().splitlines())
        report = run_campaign(dataset.folder, tmp_path / "store", engine.parameters(), ExtractionParameters(chunk_samples=10))
        canary = len(engine.request_log.read_text().splitlines()) - sent
    assert report.failed == 0
    assert canary < 15, "only the canary may be sent"
    assert {receipt.state_key: receipt.xxh3 for receipt in Store.open(tmp_path / "store").receipts()} == keys


def test_extraction_tells_the_cost_model_when_the_engine_replied(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits, replies, commit, observe = list[float](), list[float](), Store.commit_soon, CostModel.observe

    def noting_commit(*given: Any, **named: Any) -> Any:
        commits.append(time.monotonic())
        return commit(*given, **named)

    def noting_observe(self: CostModel, tokens: int, seconds: float, in_flight: int, *, finished_at: float | None = None) -> None:
        replies.extend([] if finished_at is None else [finished_at])
        observe(self, tokens, seconds, in_flight, finished_at=finished_at)

    monkeypatch.setattr(Store, "commit_soon", noting_commit)
    monkeypatch.setattr(CostModel, "observe", noting_observe)
    dataset = write_dataset(tmp_path / "dataset", random_prompts(40, 8, 64, seed=9))
    with running_engine(small_model) as engine:
        run_campaign(dataset.folder, tmp_path / "store", engine.parameters(), ExtractionParameters())
    assert len(replies) == len(commits) == 40
    assert all(replied < begun for replied, begun in zip(sorted(replies), sorted(commits), strict=True))


def test_dumps_that_cannot_be_removed_cost_no_sample(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused, remove = list[str](), DumpFolder.remove

    def refuse_states(folder: DumpFolder, name: str) -> None:
        if name.startswith(FILE_PREFIX) and folder.size_of(name):
            refused.append(name)
            raise DumpRejected(f"{name!r} in the dump folder is no folder of ours", reason="hostile-entry")
        remove(folder, name)

    dataset, extraction = write_dataset(tmp_path / "dataset", random_prompts(20, 40, 64, seed=9)), ExtractionParameters()
    with running_engine(small_model) as engine:
        settings, chunks = planned(dataset, tmp_path / "store", engine.parameters(), extraction)
        monkeypatch.setattr(DumpFolder, "remove", refuse_states)
        with shared_session(settings) as session:
            extract_all(session, chunks)
            stored, failed = len(session.store), session.progress.errors
        monkeypatch.undo()
        left = {path.name for path in engine.dump_folder.iterdir()}
    assert len(set(refused)) >= 20
    assert (stored, failed) == (20, 0)
    assert left == set(refused), "the run's lock is gone"


def test_chunk_ends_only_when_its_states_are_on_disk(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle, held = GroupCommit._settle, list[int]()

    def broken_then_slow(group_commit: GroupCommit, group: Any) -> None:
        held.append(len(group))
        if len(held) == 1:
            deadline = time.monotonic() + 10
            while not group_commit._waiting and time.monotonic() < deadline:
                time.sleep(0.01)
            raise OSError(errno.EIO, "Input/output error")
        time.sleep(0.5)
        settle(group_commit, group)

    dataset = write_dataset(tmp_path / "dataset", random_prompts(20, 40, 64, seed=9))
    extraction = ExtractionParameters(recheck_samples=0)
    with running_engine(small_model) as engine:
        settings, chunks = planned(dataset, tmp_path / "store", engine.parameters(), extraction)
        monkeypatch.setattr(GroupCommit, "_settle", broken_then_slow)
        with shared_session(settings) as session:
            with pytest.raises(StoreError, match="Input/output error"):
                extract_chunk(session, chunks[0])
            assert not list(session.store.root.glob("states/*/.tmp-*")), "each one is named or gone when the lease is given back"
            assert 0 < sum(held) - held[0] == len(session.store)


def test_run_tells_its_tuner_what_was_answered(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard, took = list[CostWindow](), InFlightTuner.took

    def noting(self: InFlightTuner, window: CostWindow) -> None:
        heard.append(window)
        took(self, window)

    monkeypatch.setattr(InFlightTuner, "took", noting)
    dataset = write_dataset(tmp_path / "dataset", random_prompts(200, 8, 64, seed=9))
    with running_engine(small_model) as engine:
        run_campaign(dataset.folder, tmp_path / "store", engine.parameters(), ExtractionParameters(in_flight=4))
    assert 100 < sum(window.requests for window in heard) <= 200
    assert {window.in_flight for window in heard} <= {1, 2, 3, 4}


def test_run_begins_with_the_number_in_flight_that_an_earlier_one_found(small_model: Path, tmp_path: Path) -> None:
    prompts, store, extraction = random_prompts(40, 8, 64, seed=9), tmp_path / "store", ExtractionParameters()
    dataset = write_dataset(tmp_path / "dataset", prompts)
    found = FoundInFlight(requests=5, mean_tokens=sum(map(len, prompts)) / len(prompts), found_at=time.time(), no_better=("more",))
    with running_engine(small_model) as engine:
        unknown = check_engine(dataset, store, engine.parameters(), extraction, keep_free_bytes=0)
        path = costs_path(store, unknown.fingerprint)
        costs = CostModel.load(path)
        costs.found_in_flight = found
        costs.save(path)
        known = check_engine(dataset, store, engine.parameters(), extraction, keep_free_bytes=0)
        assert (unknown.first_in_flight, known.first_in_flight, known.in_flight) == (32, 5, unknown.in_flight)
        plan = plan_over(dataset, store, extraction, known)
        settings = SessionSettings(
            dataset=dataset.folder, store=store, engine=engine.parameters(), extraction=extraction, in_flight=known.in_flight,
            tolerance=known.canary.tolerance,
        )  # fmt: skip
        with shared_session(settings) as session:
            assert session.window.limit == 5
            extract_all(session, pending_chunks(plan, session.store))
    assert CostModel.load(path).found_in_flight == found  # this one was too short to compare anything


def test_number_in_flight_that_a_run_finds_by_itself_is_the_next_ones_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an engine whose passes take a fifth of a second whatever is in them, so that twice as many bring twice as much."""
    monkeypatch.setattr(tuning, "BLOCK_SECONDS", 0.3)
    flags = ("--timed-base-ms", "200", "--timed-us-per-token", "0", "--max-prefill-tokens", "70000", "--chunked-prefill-size", "-1")
    store, extraction, prompts = tmp_path / "store", ExtractionParameters(), random_prompts(310, 2000, 2100, seed=9)
    first = write_dataset(tmp_path / "first", prompts[:300])
    second = write_dataset(tmp_path / "second", prompts[300:])
    with work_folder(RAM_DISK) as ram, timed_engine(tmp_path, ram / "dumps", hidden_size=8, num_layers=8, flags=flags) as engine:
        unknown = check_engine(first, store, engine.parameters(), extraction, keep_free_bytes=0)
        report = run_campaign(first.folder, store, engine.parameters(), extraction)
        known = check_engine(second, store, engine.parameters(), extraction, keep_free_bytes=0)
    found = CostModel.load(costs_path(store, known.fingerprint)).found_in_flight
    assert (report.failed, unknown.first_in_flight) == (0, 8)
    assert found is not None
    assert found.requests == known.first_in_flight
    assert known.first_in_flight >= 16


def test_forecast_counts_what_is_done_of_requests_in_flight(small_model: Path, tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "dataset", random_prompts(40, 8, 64, seed=9))
    extraction = ExtractionParameters()
    with running_engine(small_model) as engine:
        settings, _ = planned(dataset, tmp_path / "store", engine.parameters(), extraction)
        with shared_session(replace(settings, in_flight=4)) as session:
            for k in range(8):
                session.costs.observe(30, 1.0, 4, finished_at=time.monotonic() - 60 + k)
            idle = session.forecast().seconds
            with session.window.slot(30):
                assert session.forecast().seconds < 0.97 * idle
            assert session.forecast().seconds == idle


def test_state_file_from_rename_and_from_copy_holds_the_same_tensors(small_model: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    dataset = write_dataset(tmp_path / "dataset", random_prompts(5, 8, 32, seed=8))
    with running_engine(small_model) as engine:
        run_campaign(dataset.folder, tmp_path / "copied", engine.parameters(), ExtractionParameters())
        same_disk = engine.dump_folder.parent / f"{engine.dump_folder.name}-store"
        try:
            run_campaign(dataset.folder, same_disk, engine.parameters(), ExtractionParameters())
            copied, linked = Store.open(tmp_path / "copied"), Store.open(same_disk)
            for sample in dataset.samples():
                a, b = copied.path_of(sample.state_key), linked.path_of(sample.state_key)
                assert a.read_bytes() == b.read_bytes()
                assert b.stat().st_mode & 0o777 == 0o444
                assert np.array_equal(load_file(b)["token_ids"], sample.input_ids_s)
                with TensorFile.open(b) as file:
                    assert file.metadata == {}, "a label of one run would make the bytes differ from run to run"
        finally:
            import shutil

            shutil.rmtree(same_disk, ignore_errors=True)
