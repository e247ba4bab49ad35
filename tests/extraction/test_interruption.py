"""What a killed client or engine leaves, and what the next run makes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from data_contracts.parameters import ExtractionParameters
from drafter_data.extraction.campaign import run_campaign
from drafter_data.store.store import Store
from drafter_data.validation import validate_store
from tests.support.datasets import random_prompts, write_dataset
from tests.support.engines import RunningEngine, running_engine


def start_extraction(engine: RunningEngine, dataset: Path, store: Path) -> subprocess.Popen[bytes]:
    """`drafter-data extract` as a child process."""
    command = [sys.executable, "-m", "drafter_data", "extract", str(dataset), "--store", str(store), "--url", engine.url]
    return subprocess.Popen([*command, "--kind", "embedded"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for_receipts(store: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    """Returns once that many receipts are on disk."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        assert process.poll() is None, "the extraction ended before it could be killed"
        if sum(path.read_bytes().count(b"\n") for path in store.glob("receipts/*.jsonl")) >= count:
            return
        time.sleep(0.01)
    raise AssertionError("no receipts appeared")


def prompts_sent(engine: RunningEngine) -> list[int]:
    """Prompt lengths in the order that the engine was asked."""
    return [json.loads(line)["tokens"] for line in engine.request_log.read_text().splitlines()]


def test_extraction_killed_in_mid_chunk_goes_on_without_repeating_what_has_a_receipt(small_model: Path, tmp_path: Path) -> None:
    # Every length is unique, so the engine's log tells which prompt was asked.
    prompts = [prompt[:length] for length, prompt in enumerate(random_prompts(260, 300, 300, seed=9), start=30)]
    dataset = write_dataset(tmp_path / "dataset", prompts)
    store = tmp_path / "store"
    with running_engine(small_model) as engine:
        process = start_extraction(engine, dataset.folder, store)
        wait_for_receipts(store, 60, process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        receipted = {receipt.tokens for receipt in Store.open(store).receipts()}
        assert 60 <= len(receipted) < 260
        before = len(prompts_sent(engine))
        report = run_campaign(dataset.folder, store, engine.parameters(), ExtractionParameters(recheck_samples=0))
        asked_again = prompts_sent(engine)[before:]
        left = [entry.name for entry in engine.dump_folder.iterdir() if not entry.name.startswith(".")]
    assert (report.stored, report.failed) == (260, 0)
    # The canary asks a few lengths of its own; what has a receipt may appear no more often than the canary put it there.
    repeated = Counter(length for length in asked_again if length in receipted)
    assert sum(repeated.values()) <= 10
    assert left == [], "the killed run's dumps must be swept"
    assert list(store.rglob(".tmp-*")) == []
    keys = [
        json.loads(line)["state_key"] for path in (store / "receipts").glob("*.jsonl") for line in path.read_text().splitlines()
    ]
    assert len(keys) == len(set(keys)) == 260
    checked = validate_store(Store.open(store), dataset)
    assert (checked.errors, checked.missing, checked.orphans) == (0, 0, 0)


def test_extraction_engine_killed_and_started_again_loses_nothing(small_model: Path, tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "dataset", random_prompts(200, 50, 300, seed=10))
    store = tmp_path / "store"
    with running_engine(small_model) as engine:
        foreign = engine.dump_folder / "foreign.bin"
        foreign.write_bytes(b"of somebody else")
        process = start_extraction(engine, dataset.folder, store)
        wait_for_receipts(store, 40, process)
        os.killpg(engine.process.pid, signal.SIGKILL)
        engine.process.stop()
        engine.process.start()
        assert process.wait(timeout=120) == 0
        assert foreign.read_bytes() == b"of somebody else"
        names = [entry.name for entry in engine.dump_folder.iterdir() if not entry.name.startswith(".dd-")]
        assert names == ["foreign.bin"]
    checked = validate_store(Store.open(store), dataset)
    assert (checked.samples, checked.errors, checked.missing) == (200, 0, 0)
