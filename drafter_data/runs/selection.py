"""Which rows of the spilled ones become the dataset: each content once, and a seeded sample of them where a budget is set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from drafter_data.runs.options import MergeOptions
from drafter_data.runs.spill import keys_of, read_partition


@dataclass(frozen=True, slots=True)
class PartitionOrder:
    """`order` sorts a partition's rows by key, smallest run first; `first` marks, in that order, the first row of each key."""

    order: NDArray[np.int64]
    first: NDArray[np.bool_]


def order_partition(rows: pa.Table) -> PartitionOrder:
    """The order of one partition's rows (SPILL_SCHEMA). Units are numbered by run name, file and place."""
    keys = keys_of(rows.column("sample_key"))
    unit, line = rows.column("unit").to_numpy(), rows.column("line").to_numpy()
    order = np.lexsort((line, unit, keys["c"], keys["b"], keys["a"]))
    ordered = keys[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return PartitionOrder(order, first)


def choose_sample(folder: Path, partitions: int, options: MergeOptions) -> list[NDArray[np.bool_]] | None:
    """For each partition, which of its distinct rows (in key order) are in the sample; None where no budget is set.

    A row's place in the draw follows from the seed and its content alone, so that the sample does not depend on the order
    of runs, and a larger budget takes a larger part of the same draw.
    """
    if options.sample_rows is None and options.sample_tokens is None:
        return None
    draws: list[NDArray[np.uint64]] = []
    lengths: list[NDArray[np.int64]] = []
    for partition in range(partitions):
        rows = read_partition(folder, partition)
        order = order_partition(rows)
        distinct = order.order[order.first]
        draws.append(_draw(keys_of(rows.column("sample_key"))[distinct]["a"].astype(np.uint64), options.seed))
        lengths.append(rows.column("num_tokens").to_numpy()[distinct].astype(np.int64))
    chosen = _within_budget(np.concatenate(draws), np.concatenate(lengths), options)
    return np.split(chosen, np.cumsum([len(draw) for draw in draws])[:-1])


def _draw(heads: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """SplitMix64 of the key's first 8 bytes and the seed: uniform, and another order for another seed."""
    value = heads ^ np.uint64(xxhash.xxh3_64_intdigest(f"sample{seed}".encode()))
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _within_budget(draws: NDArray[np.uint64], lengths: NDArray[np.int64], options: MergeOptions) -> NDArray[np.bool_]:
    order = np.argsort(draws, kind="stable")
    count = len(order) if options.sample_rows is None else min(len(order), options.sample_rows)
    if options.sample_tokens is not None:
        count = min(count, int(np.searchsorted(np.cumsum(lengths[order]), options.sample_tokens, side="right")))
    chosen = np.zeros(len(order), dtype=bool)
    chosen[order[:count]] = True
    return chosen


@dataclass(frozen=True, slots=True)
class Conflicts:
    """`ids` are hashes of source ids that stand for more than one content; `per_run` counts them for each run."""

    ids: frozenset[int]
    per_run: dict[int, int]


def find_conflicts(
    id_hashes: Sequence[NDArray[np.uint64]], contents: Sequence[NDArray[np.uint64]], runs: Sequence[NDArray[np.int32]]
) -> Conflicts:
    """Finds ids with several contents among the kept rows that carry an id; the three lists run parallel."""
    if not id_hashes:
        return Conflicts(frozenset(), {})
    ids = np.concatenate(id_hashes)
    ordered = np.sort(ids)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not len(repeated):
        return Conflicts(frozenset(), {})
    place = np.minimum(np.searchsorted(repeated, ids), len(repeated) - 1)
    candidate = np.flatnonzero(repeated[place] == ids)  # only these can conflict: memory stays bounded by what repeats
    ids, heads, run_of = ids[candidate], np.concatenate(contents)[candidate], np.concatenate(runs)[candidate]
    order = np.lexsort((heads, ids))
    ids, heads, run_of = ids[order], heads[order], run_of[order]
    again = np.flatnonzero((ids[1:] == ids[:-1]) & (heads[1:] != heads[:-1])) + 1
    conflicting = np.unique(ids[again])
    inside = np.isin(ids, conflicting)
    pairs = np.unique(np.stack([run_of[inside].astype(np.uint64), ids[inside]]), axis=1)
    counts = np.unique(pairs[0], return_counts=True) if pairs.size else (np.zeros(0), np.zeros(0))
    return Conflicts(frozenset(conflicting.tolist()), {int(run): int(count) for run, count in zip(*counts, strict=True)})
