"""1,000 seeded corruptions of a good store: all found, each by its right name, and no false alarm."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

from data_contracts.identity import StoreIdentity
from drafter_data.embedded.checkpoint import ensure_checkpoint
from drafter_data.embedded.llama import Llama
from drafter_data.store.store import Store
from drafter_data.validation import validate_store
from tests.store.making import dump_of, key_of
from tests.validation.corruptions import CORRUPTIONS, LAYERS, VOCABULARY, copy_store, corrupt, remove

GOOD, ROUNDS, PER_ROUND, ROUND_STATES = 1000, 10, 100, 400


def good_store(root: Path, model: Llama) -> Store:
    """1,000 states of 16 to 160 tokens of the embedded model, committed as the extraction would."""
    identity = StoreIdentity(weights_digest="w", num_layers=8, hidden_size=64, layers=LAYERS, dtype="F32")
    store = Store.open(root, identity)
    rng = np.random.default_rng(11)
    for _ in range(GOOD):
        ids = rng.integers(5, VOCABULARY, int(np.exp(rng.normal(4.2, 0.5)).clip(16, 160)))
        store.commit(dump_of(ids, states_slh=model.forward(ids, LAYERS)), key_of(ids), ids, chunk="good")
    return store


@pytest.fixture
def fast_folder(tmp_path: Path) -> Generator[Path]:
    """Memory where there is some: nothing here is about the disk."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else tmp_path) as folder:
        yield Path(folder)


def test_validator_thousand_corruptions_are_all_found_by_name_without_a_false_alarm(fast_folder: Path) -> None:
    model = Llama.load(ensure_checkpoint(fast_folder / "model"))
    store = good_store(fast_folder / "good", model)
    clean = validate_store(store, None)
    assert (clean.errors, clean.states) == (0, GOOD)
    receipts = {receipt.state_key: receipt for receipt in store.receipts()}
    rng = np.random.default_rng(12)
    wrong: list[tuple[str, str | None]] = []
    false_alarms, made = [], Counter[str]()
    for number in range(ROUNDS):
        keys = [str(key) for key in rng.choice(sorted(receipts), ROUND_STATES, replace=False)]
        copy = copy_store(store, fast_folder / f"round{number}", keys)
        free, expected = list(keys), {}
        for k in range(PER_ROUND):
            seed = number * PER_ROUND + k
            early = [kind for kind in CORRUPTIONS if kind.early == (k % 2 == 0)]
            corruption = early[seed // 2 % len(early)]
            key = next(key for key in free if receipts[key].tokens >= corruption.least_tokens)
            free.remove(key)
            corrupt(copy, key, corruption, model, seed)
            expected[key] = corruption
            made[corruption.name] += 1
        copy.close()
        report = validate_store(Store.open(copy.root), None)
        found = {finding.state_key: finding.reason for finding in report.findings}
        assert report.errors == len(found)
        wrong += [(kind.name, found.get(key)) for key, kind in expected.items() if found.get(key) not in kind.reasons]
        false_alarms += [(key, found[key]) for key in free if key in found]
        remove(copy)
    assert sum(made.values()) == 1000 and len(made) == len(CORRUPTIONS)
    assert false_alarms == []
    assert wrong == []
