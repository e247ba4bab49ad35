"""A tiny model, prompts with answers of its own, and a real store of their states: what the hand-off tests begin with."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_contracts.identity import StoreIdentity
from drafter_data.checkpoints import Checkpoint
from drafter_data.dataset import Dataset
from drafter_data.embedded.llama import Llama
from drafter_data.engines.base import ClaimedDump
from drafter_data.store.store import Store
from tests.store.making import key_of, write_dataset

LAYERS = (2, 4, 5, 8)
Row = tuple[NDArray[np.int64], NDArray[np.uint8]]


@dataclass
class World:
    """A dataset, its store and the model that the states come from."""

    model: Path
    dataset: Dataset
    store: Store

    def state_path(self, row: int) -> Path:
        """The state file of a dataset row."""
        return self.store.path_of(next(self.dataset.take([row])).state_key)

    def key(self, row: int) -> str:
        """The sample key of a dataset row."""
        return next(self.dataset.take([row])).sample_key


def own_answers(model: Llama, count: int, *, seed: int, shortest: int = 16, longest: int = 48) -> list[Row]:
    """Random prompts with answers that the model itself samples; the answer is supervised."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for _ in range(count):
        prompt_tokens, tokens = int(rng.integers(4, 9)), int(rng.integers(shortest, longest + 1))
        ids = [int(i) for i in rng.integers(5, model.config.vocab_size, prompt_tokens)]
        cache = model.cache(tokens)
        states = model.forward(np.array(ids, np.int64), [8], cache)
        while len(ids) < tokens:
            logits_v = model.logits(states[-1:, 0])[0]
            noise_v = rng.gumbel(size=len(logits_v))
            ids.append(int(np.argmax(logits_v / 0.7 + noise_v)))
            states = model.forward(np.array(ids[-1:], np.int64), [8], cache)
        mask_s = (np.arange(tokens) >= prompt_tokens).astype(np.uint8)
        rows.append((np.array(ids, np.int64), mask_s))
    return rows


def identity_of_model(model: Path, **changes: object) -> StoreIdentity:
    """The identity of fp32 states of this checkpoint."""
    checkpoint = Checkpoint.open(model)
    fields = {
        "weights_digest": checkpoint.weights_digest(),
        "num_layers": checkpoint.num_layers,
        "hidden_size": checkpoint.hidden_size,
        "layers": LAYERS,
        "dtype": "F32",
    }
    return StoreIdentity.model_validate(fields | changes)


def commit_states(store: Store, ids_s: NDArray[np.int64], states_slh: NDArray[np.float32]) -> None:
    """Commits states as if an engine had dumped them."""
    dump = ClaimedDump(
        request_id="dd-test",
        states_slh=states_slh,
        dtype="F32",
        token_ids_s=ids_s,
        proof="label",
        proof_error=None,
        entries=(),
    )
    store.commit(dump, key_of(ids_s), ids_s, chunk="test")


def make_world(folder: Path, model: Path, rows: list[Row], *, instead: Mapping[int, NDArray[np.int64]] | None = None) -> World:
    """A world in `folder`. `instead` commits, for the n-th row, the states of other ids under the row's own."""
    llama = Llama.load(model)
    store = Store.open(folder / "store", identity_of_model(model))
    for n, (ids_s, _) in enumerate(rows):
        source_s = (instead or {}).get(n, ids_s)
        commit_states(store, ids_s, llama.forward(source_s, LAYERS))
    return World(model, write_dataset(folder / "dataset", rows, group_rows=16), store)


def rewrite(path: Path, data: bytes) -> None:
    """Overwrites a committed state behind the store's back, in place of a disk or a careless script."""
    path.chmod(0o644)
    time.sleep(0.01)
    path.write_bytes(data)
    path.chmod(0o444)
