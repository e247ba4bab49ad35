"""What the parameters decide: failures in a row, the error rate, the exclusion list, space to be kept, other people's dumps."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from data_contracts.extraction import GateReport
from data_contracts.identity import StoreIdentity
from drafter_data.claiming import unlabelled
from drafter_data.claiming.folder import DumpFolder
from drafter_data.claiming.unlabelled import UnlabelledClaims
from drafter_data.engines.base import PrefillReply, PrefillRequest
from drafter_data.errors import DumpMissing, GateClosed, PreflightRefused, StoreFull, TooManyFailures
from drafter_data.extraction.chunk import read_failures
from drafter_data.gate import exclusions, judge, require_open
from drafter_data.planning import load_plan
from drafter_data.store.store import Store
from drafter_data.validation import validate_store
from tests.faults.cells import Bench, Setting, bench
from tests.store.mounts import remount, small_tmpfs
from tests.support.datasets import random_prompts, write_dataset

SAMPLES = 24


def sent(made: Bench) -> int:
    return len(made.engine.request_log.read_text().splitlines())


def judged(made: Bench, store: Path, max_error_rate: float) -> GateReport:
    opened = Store.open(store)
    try:
        return judge(load_plan(store, made.dataset.record.dataset_id), opened, max_error_rate=max_error_rate)
    finally:
        opened.close()


def test_policies_of_failing_samples_hold_and_are_listed(small_model: Path, tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "dataset", random_prompts(SAMPLES, 20, 60, seed=51))
    with bench(Setting(True, 1), small_model, dataset, tmp_path / "bench") as made:
        _stop_after_failures_in_a_row(made)
        _error_rate_and_exclusions(made)
        _canary_that_is_not_given_twice(made)


def _stop_after_failures_in_a_row(made: Bench) -> None:
    made.set_faults({"name": "nan"})
    store, before = made.new_store(), sent(made)
    with pytest.raises(TooManyFailures, match="5 samples failed in a row, the last with not-finite") as stopped:
        made.extract(store, stop_after_failures=5, attempts=1)
    assert stopped.value.reason == "failures-in-a-row"
    assert sent(made) - before < SAMPLES, "it stops at once"
    plan = load_plan(store, made.dataset.record.dataset_id)
    record = read_failures(store, plan.dataset_id, plan.chunks[0].key)
    assert record is not None
    assert (record.stopped_by, len(record.failures)) == ("failures-in-a-row", 5)
    reasons = [failure.reason for chunk in judged(made, store, 0.0).failed_chunks for failure in chunk.failures]
    assert sorted(set(reasons)) == ["failures-in-a-row", "not-finite"], "those that it did not get to say why, too"
    made.set_faults()
    assert made.extract(store).stored == SAMPLES


def _error_rate_and_exclusions(made: Bench) -> None:
    made.set_faults({"name": "nan", "rate": 0.3, "per_prompt": True})
    store = made.new_store()
    failed = made.extract(store).failed
    assert 0 < failed < SAMPLES
    with pytest.raises(GateClosed, match=f"{failed} of {SAMPLES} samples failed"):
        require_open(judged(made, store, (failed - 0.5) / SAMPLES))
    report = judged(made, store, failed / SAMPLES)
    require_open(report)
    listed = exclusions(load_plan(store, made.dataset.record.dataset_id), report, made.dataset)
    assert [(one.kind, one.reason) for one in listed] == [("failed", "not-finite")] * failed
    found = validate_store(Store.open(store), made.dataset)
    assert (found.errors, found.missing) == (failed, failed)
    assert {finding.state_key for finding in found.findings} == {one.state_key for one in listed}
    assert all("not-finite after 2 attempts" in finding.found for finding in found.findings), "and validation says why"
    made.set_faults()


def _canary_that_is_not_given_twice(made: Bench) -> None:
    made.set_faults({"name": "shifted-layer", "after": 1})
    with pytest.raises(PreflightRefused, match="one prompt sent twice") as refused:
        made.preflight(made.new_store())
    assert refused.value.reason == "canary-repeat-differs"


def test_space_to_be_kept_stops_the_run_in_mid_chunk_and_it_goes_on(small_model: Path, tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "dataset", random_prompts(SAMPLES, 90, 100, seed=52))  # about 100 kB a sample
    with (
        small_tmpfs(tmp_path / "disk", "size=16m") as disk,
        bench(Setting(True, 1), small_model, dataset, tmp_path / "bench") as made,
    ):
        store = disk / "store"
        made.set_faults({"name": "cut-prompt"})
        assert made.extract(store).stored == 0  # plan and folders are there
        made.set_faults({"name": "late", "seconds": 0.05})
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        keep = free - 3_000_000
        foreign = disk / "grows-meanwhile"

        def grow() -> None:
            while len(list(store.glob("states/*/*.safetensors"))) < 5:
                time.sleep(0.005)
            foreign.write_bytes(b"\0" * 2_800_000)

        with made.meanwhile(grow), pytest.raises(StoreFull, match="stopped before the disk is full"):
            made.extract(store, keep_free_bytes=keep)
        stored = len(Store.open(store))
        assert 5 <= stored < SAMPLES
        foreign.unlink()
        remount(disk, "size=32m")
        report = made.extract(store, keep_free_bytes=keep)
        assert (report.stored, report.failed) == (SAMPLES, 0)
        made.compare(store)
        assert made.wrong == 0


@pytest.mark.parametrize("exclusive", [True, False], ids=["exclusive", "shared"])
def test_strays_are_swept_where_the_folder_is_ours_alone_and_named_where_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exclusive: bool
) -> None:
    monkeypatch.setattr(unlabelled, "STRAY_SECONDS", 0.1)
    dumps = tmp_path / "dumps"
    dumps.mkdir(mode=0o700)
    identity = StoreIdentity(weights_digest="w", num_layers=8, hidden_size=4, layers=(2, 8), dtype="F32")

    def dump(number: int, tokens: int) -> None:
        folder = dumps / f"req_{number:08d}"
        folder.mkdir(mode=0o700)
        header = f'{{"hidden_states":{{"dtype":"F32","shape":[{tokens},4],"data_offsets":[0,{tokens * 16}]}}}}'.encode()
        for layer in identity.layers:
            data = len(header).to_bytes(8, "little") + header + np.ones(tokens * 4, "<f4").tobytes()
            (folder / f"layer_{layer}.safetensors").write_bytes(data)
        (folder / "meta.json").write_text(f'{{"num_tokens": {tokens}, "final_norm": "pre"}}')

    dump(0, 9)  # there before the lease: never touched
    claims = UnlabelledClaims(DumpFolder.open(dumps), identity, None, exclusive=exclusive, run="aaaaaaaa")
    request = PrefillRequest(claims.request_id(1), "k", np.arange(16, 22))
    claims.before_send(request)
    other = PrefillRequest(claims.request_id(2), "k", np.arange(16, 23))
    claims.before_send(other)
    for number in range(1, 20):
        dump(number, 1)  # health checks
    dump(20, len(other.token_ids_s))  # what another request of ours waits for
    with pytest.raises(DumpMissing) as missing:
        claims.claim(request, PrefillReply(request.request_id, request.tokens, 0, time.time(), 0.0), time.monotonic() + 0.5)
    left = {path.name for path in dumps.glob("req_*")}
    assert {"req_00000000", "req_00000020"} <= left
    assert len(left) == (2 if exclusive else 21)
    assert claims.swept == (19 if exclusive else 0)
    assert ("20 dumps of others lie there (req_00000000, " in str(missing.value)) == (not exclusive)
