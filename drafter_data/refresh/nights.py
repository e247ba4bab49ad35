"""The refresh's own records in its work folder, and the counting of what a night did."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from data_contracts.refresh import MARK_FILE, NIGHTS_FILE, Night, RefreshMark
from drafter_data.dataset import Dataset
from drafter_data.errors import InputError
from drafter_data.files import append_line, write_atomic
from drafter_data.gate import judge
from drafter_data.planning import load_plan
from drafter_data.store.store import RECORD_FILE, Store


def read_mark(folder: Path) -> RefreshMark:
    """The mark of the last complete night; an empty one where none can be read, so that all runs count as new."""
    try:
        return RefreshMark.model_validate_json((folder / MARK_FILE).read_bytes())
    except (FileNotFoundError, ValidationError):
        return RefreshMark()


def write_mark(folder: Path, mark: RefreshMark) -> None:
    """Writes down what was worked through."""
    write_atomic(folder / MARK_FILE, mark.model_dump_json(indent=1))


def append_night(folder: Path, night: Night) -> None:
    """Adds a night to the table."""
    append_line(folder / NIGHTS_FILE, night.model_dump_json().encode())


def read_nights(folder: Path) -> list[Night]:
    """All nights, oldest first; lines that are none are left out."""
    nights: list[Night] = []
    path = folder / NIGHTS_FILE
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            nights.append(Night.model_validate_json(line))
        except ValidationError:
            continue
    return nights


def earlier_version(folder: Path, dataset_id: str) -> Dataset | None:
    """A dataset version of the work folder, if it is (still) there."""
    try:
        return Dataset.open(folder / "datasets" / dataset_id) if dataset_id else None
    except InputError:
        return None


@dataclass(frozen=True)
class Stored:
    """The distinct prompts of some rows: tokens of each by state key, and which of them the store has."""

    tokens: dict[str, int]
    there: frozenset[str]


def stored_of(dataset: Dataset, store_root: Path, new_r: NDArray[np.bool_] | None = None) -> Stored:
    """What the store, which need not be there yet, has of a dataset's prompts, or of those of its rows `new_r` (bool [R]) alone."""
    columns = dataset.columns("state_key", "num_tokens")
    keys, tokens = columns.column("state_key").to_pylist(), columns.column("num_tokens").to_pylist()
    wanted = np.ones(len(keys), dtype=bool) if new_r is None else new_r
    prompts = {key: count for key, count, one in zip(keys, tokens, wanted, strict=True) if one}
    if not (store_root / RECORD_FILE).is_file():
        return Stored(prompts, frozenset())
    store = Store.open(store_root)
    try:
        return Stored(prompts, frozenset(key for key in prompts if key in store))
    finally:
        store.close()


def counted(night: Night, dataset: Dataset, store_root: Path, before: Stored) -> Night:
    """The night with what was brought of the dataset's prompts since `before`, and how many are planned and still missing."""
    after = stored_of(dataset, store_root)
    tokens = sum(after.tokens[key] for key in after.there - before.there)
    night = night.model_copy(update={"extracted": len(after.there - before.there), "tokens": tokens})
    if not (store_root / RECORD_FILE).is_file():
        return night
    store = Store.open(store_root)
    try:
        size = tokens * store.identity.bytes_per_token
        failed = judge(load_plan(store_root, dataset.record.dataset_id), store, max_error_rate=1.0).failed
    except InputError:  # the night ended before there was a plan
        return night
    finally:
        store.close()
    return night.model_copy(update={"bytes": size, "failed": failed})
