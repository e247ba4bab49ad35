"""Two runs at once: on one engine, on one chunk; and a close while nobody answers."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from data_contracts.parameters import ExtractionParameters
from drafter_data.engines.connect import connect
from drafter_data.errors import DrafterDataError, LeaseHeld
from drafter_data.extraction.campaign import plan_over, run_campaign
from drafter_data.store.leases import Lease
from drafter_data.store.store import Store
from drafter_data.validation import validate_store
from tests.faults.cells import UNLABELLED_FLAGS, Setting, bench
from tests.support.datasets import random_prompts, write_dataset
from tests.support.engines import running_engine


def test_two_pipelines_on_one_engine_with_labels_each_get_their_own(small_model: Path, tmp_path: Path) -> None:
    # The same lengths on both sides: only the label tells the dumps apart.
    datasets = [write_dataset(tmp_path / f"dataset{n}", random_prompts(60, 20, 24, seed=30 + n)) for n in range(2)]
    with running_engine(small_model) as engine, ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(run_campaign, dataset.folder, tmp_path / f"store{n}", engine.parameters(), ExtractionParameters())
            for n, dataset in enumerate(datasets)
        ]
        assert [(run.result().stored, run.result().failed) for run in runs] == [(60, 0)] * 2
        assert [path.name for path in engine.dump_folder.iterdir() if not path.name.startswith(".")] == []
    for n, dataset in enumerate(datasets):
        assert validate_store(Store.open(tmp_path / f"store{n}"), dataset).errors == 0


def test_two_pipelines_on_one_engine_without_labels_the_second_is_refused_with_the_holder(small_model: Path) -> None:
    with running_engine(small_model, *UNLABELLED_FLAGS) as engine:
        parameters = engine.parameters(kind="sglang-unlabelled")
        first = connect(parameters, request_timeout_seconds=5)
        with pytest.raises(LeaseHeld, match=r"in use by run [0-9a-f]{8}, process \d+") as caught:
            connect(parameters, request_timeout_seconds=5)
        assert caught.value.reason == "dump-folder-held"
        first.close()
        connect(parameters, request_timeout_seconds=5).close()


def test_two_runs_of_one_dataset_share_the_chunks_and_extract_nothing_twice(small_model: Path, tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "dataset", random_prompts(90, 20, 60, seed=33))
    extraction = ExtractionParameters(chunk_samples=15, recheck_samples=0)
    with running_engine(small_model) as engine, ThreadPoolExecutor(2) as pool:
        # Two sets of parameters, so that they do not share one session of this process.
        others = extraction.model_copy(update={"in_flight": 8})
        runs = [
            pool.submit(run_campaign, dataset.folder, tmp_path / "store", engine.parameters(), one) for one in (extraction, others)
        ]
        assert [(run.result().stored, run.result().failed) for run in runs] == [(90, 0)] * 2
    lines = [line for path in (tmp_path / "store" / "receipts").glob("*.jsonl") for line in path.read_text().splitlines()]
    assert len(lines) == 90
    assert validate_store(Store.open(tmp_path / "store"), dataset).errors == 0


def test_chunk_of_a_dead_host_comes_last_and_is_taken_when_its_lease_ends(small_model: Path, tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "dataset", random_prompts(40, 20, 60, seed=36))
    with bench(Setting(True, 8), small_model, dataset, tmp_path / "bench") as made:
        assert made.checked is not None
        extraction = made.extraction(chunk_samples=10)
        plan = plan_over(dataset, tmp_path / "store", extraction, made.checked)
        held = plan.chunks[0].key
        # As its last renewal left it: nobody here can ask whether that process lives.
        far = Lease(holder="run one", host="elsewhere", process="b/1/2/3", expires_at=time.time() + 4)
        (tmp_path / "store" / "leases" / f"{held}.json").write_text(far.model_dump_json())
        report = made.extract(tmp_path / "store", chunk_samples=10)
        assert (report.stored, report.failed, made.wrong) == (40, 0, 0)
        assert time.time() < far.expires_at + 20
    committed = [(receipt.chunk == held, receipt.committed_at) for receipt in Store.open(tmp_path / "store").receipts()]
    first_of_held = min(at for of_held, at in committed if of_held)
    assert first_of_held > far.expires_at
    assert max(at for of_held, at in committed if not of_held) < first_of_held


@pytest.mark.parametrize("labelled", [True, False])
def test_close_while_nobody_answers_ends_within_seconds(small_model: Path, tmp_path: Path, labelled: bool) -> None:
    from drafter_data.extraction import campaign
    from drafter_data.extraction.session import ExtractionSession, SessionSettings

    dataset = write_dataset(tmp_path / "dataset", random_prompts(20, 20, 60, seed=34))
    with bench(Setting(labelled, 8), small_model, dataset, tmp_path / "bench") as made:
        made.set_faults({"name": "silent", "after": 3})
        extraction = made.extraction(request_timeout_seconds=600, dump_timeout_seconds=600)
        assert made.checked is not None
        plan = campaign.plan_over(dataset, tmp_path / "store", extraction, made.checked)
        settings = SessionSettings(
            dataset.folder, tmp_path / "store", made.parameters, extraction, made.checked.in_flight, made.checked.canary.tolerance
        )
        session = ExtractionSession(settings)

        def extract() -> None:
            with pytest.raises(DrafterDataError):
                campaign.extract_all(session, [plan.chunks[0].index])

        ended = threading.Thread(target=extract)
        ended.start()
        end = time.monotonic() + 30
        while session.window.in_flight < 8 and time.monotonic() < end:
            time.sleep(0.02)
        start = time.monotonic()
        session.close()
        ended.join(20)
        assert not ended.is_alive()
        assert time.monotonic() - start < 10
        made.compare(tmp_path / "store")
        assert made.wrong == 0
        made.set_faults()
        report = made.extract(tmp_path / "store")
        assert (report.stored, report.failed) == (20, 0)


def test_sample_that_failed_often_enough_is_quarantined_and_still_listed(small_model: Path, tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "dataset", random_prompts(12, 20, 60, seed=35))
    with bench(Setting(True, 4), small_model, dataset, tmp_path / "bench") as made:
        made.set_faults({"name": "nan", "rate": 0.3, "per_prompt": True})
        first = made.extract(tmp_path / "store", quarantine_attempts=4)
        assert 0 < first.failed < 12
        second = made.extract(tmp_path / "store", quarantine_attempts=4)
        sent = len(made.engine.request_log.read_text().splitlines())
        third = made.extract(tmp_path / "store", quarantine_attempts=4)
        assert len(made.engine.request_log.read_text().splitlines()) == sent, "what is quarantined is not sent"
        assert first.failed == second.failed == third.failed
        (failure, *_) = third.failed_chunks[0].failures
        assert (failure.reason, failure.attempts) == ("not-finite", 4)
