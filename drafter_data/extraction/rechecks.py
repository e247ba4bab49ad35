"""What was extracted a second time and compared: the record of it, and whether the engine still is what it was.

A sample of its own shows a chunk that the engine gives one prompt the same states twice. It cannot show an engine that gives other
states than it did: one that was started again with other layers, another norm or other weights in mid-run. So each chunk ends by
asking again for a sample from the beginning of the run, or from before it.

`STORE/plans/<dataset_id>/rechecks/<chunk_key>.json` holds a `ChunkRechecks`; validation reports them.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from data_contracts.extraction import RECHECKS_FOLDER, ChunkRechecks, Recheck
from drafter_data.errors import EngineChanged, SampleError, StateCorrupt
from drafter_data.extraction.sample import SampleWork
from drafter_data.files import write_atomic
from drafter_data.planning import plan_folder
from drafter_data.store.store import Store

TRIES = 3
"""How often such a sample is asked for: one answer that differs may be a fault of that answer."""
ANCHORS = 8
MOST_DIFFERING = 2
LARGEST = 1e9

Distance = Callable[[SampleWork], float]
"""How far a new extraction of a sample is from the stored one; raises SampleError."""


def record_rechecks(store_root: Path, dataset_id: str, chunk_key: str, compared: Collection[Recheck]) -> None:
    """Adds comparisons to what earlier runs of the chunk recorded."""
    if not compared:
        return
    known = {(one.state_key, one.earlier): one for one in read_rechecks(store_root, dataset_id, chunk_key)}
    for one in compared:
        known[one.state_key, one.earlier] = one.model_copy(update={"distance": min(one.distance, LARGEST)})
    record = ChunkRechecks(chunk_key=chunk_key, rechecks=tuple(known.values()))
    write_atomic(_path(store_root, dataset_id, chunk_key), record.model_dump_json(indent=1))


def read_rechecks(store_root: Path, dataset_id: str, chunk_key: str) -> tuple[Recheck, ...]:
    """What was compared of a chunk."""
    with suppress(FileNotFoundError, ValidationError):
        return ChunkRechecks.model_validate_json(_path(store_root, dataset_id, chunk_key).read_bytes()).rechecks
    return ()


def _path(store_root: Path, dataset_id: str, chunk_key: str) -> Path:
    return plan_folder(store_root, dataset_id) / RECHECKS_FOLDER / f"{chunk_key}.json"


class Anchors:
    """A few states from before a session, or the first ones that it stores. Thread-safe."""

    def __init__(self, store: Store) -> None:
        chosen = set(random.sample(range(len(store)), min(ANCHORS, len(store))))
        self._keys = [key for place, key in enumerate(store.keys()) if place in chosen]  # never all of a million keys at once
        self._lock = threading.Lock()

    def add(self, state_key: str) -> None:
        """Takes in a state that was just stored, while there are few."""
        with self._lock:
            if len(self._keys) < ANCHORS:
                self._keys.append(state_key)

    def some(self) -> list[str]:
        """All of them, in an order of chance."""
        with self._lock:
            return random.sample(self._keys, len(self._keys))


def check_unchanged(store: Store, anchors: Anchors, distance: Distance, tolerance: float) -> Recheck | None:
    """Compares a state of the run's beginning with what the engine gives for its prompt now.

    Returns the comparison; None where nothing could be compared. A state that differs while another one does not was wrong itself,
    and leaves the store. Raises EngineChanged where two differ, or the only one.
    """
    differing: list[Recheck] = []
    for key in anchors.some():
        found = _compare(store, key, distance, tolerance) if key in store else None
        if found is None:
            continue
        compared = Recheck(state_key=key, distance=found, tolerance=tolerance, earlier=True)
        if found <= tolerance:
            store.discard({one.state_key: "recheck-differs" for one in differing})
            return differing[0] if differing else compared
        differing.append(compared)
        if len(differing) == MOST_DIFFERING:
            break
    if not differing:
        return None
    receipt = store.find(differing[0].state_key)
    raise EngineChanged(
        f"store {store.root}: the engine does not give the states any more that it gave before: sample "
        f"{differing[0].state_key[:12]}, stored at {_clock(receipt.committed_at if receipt else 0)}, differs by "
        f"{differing[0].distance:.2e}, tolerance {tolerance:.2e}: other layers, another norm or other weights since then; what "
        "the chunks under way had stored was taken back. Start the engine as it was, or name a new store"
    )


def _compare(store: Store, key: str, distance: Distance, tolerance: float) -> float | None:
    """The smallest distance of a few tries; None where no try came to an end."""
    try:
        view = store.read(key)
    except StateCorrupt:
        return None  # fsck's affair
    work = SampleWork(key, np.array(view.token_ids_s))
    view.close()
    found: list[float] = []
    for _ in range(TRIES):
        with suppress(SampleError):
            found.append(distance(work))
            if found[-1] <= tolerance:
                break
    return min(found) if found else None


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
