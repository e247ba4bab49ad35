"""The plan: equal cost, kept, exclusions, lengths distinct in flight."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from data_contracts.identity import chunk_key
from drafter_data.costs import CostModel
from drafter_data.dataset import Dataset
from drafter_data.errors import InputError
from drafter_data.gate import judge
from drafter_data.planning import chunk_rows, load_plan, make_plan, neighbours_differ, plan_folder
from drafter_data.store.store import Store
from tasks.validate import plan_again
from tests.store.making import commit, identity_of, ids_of, small_dataset, write_dataset


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store", identity_of())


def planned_rows(store: Store, dataset: Dataset, chunks: int) -> list[int]:
    identifier = dataset.record.dataset_id
    return [sample.row for index in range(chunks) for sample in chunk_rows(store.root, identifier, index)]


def test_plan_new_store_brings_every_state_once_in_chunks_of_equal_cost(tmp_path: Path, store: Store) -> None:
    dataset = small_dataset(tmp_path / "data", 1000, longest=200)
    plan = make_plan(dataset, store, CostModel(), chunk_samples=50, max_prompt_tokens=512)
    assert len(plan.chunks) == 20
    assert sorted(planned_rows(store, dataset, 20)) == list(range(1000))
    seconds = np.array([chunk.predicted_seconds for chunk in plan.chunks])
    assert seconds.max() / seconds.min() < 1.1
    samples = chunk_rows(store.root, dataset.record.dataset_id, 3)
    rows = {sample.row: sample for sample in samples}
    for sample in dataset.take(list(rows)):
        assert (rows[sample.row].state_key, rows[sample.row].num_tokens) == (sample.state_key, sample.tokens)
    assert plan.chunks[3].key == chunk_key(sample.state_key for sample in samples)
    assert plan.chunks[3].samples == len(samples)
    assert pq.read_metadata(plan_folder(store.root, plan.dataset_id) / "samples.parquet").num_row_groups == 20


def test_plan_kept_store_filled_meanwhile_returns_the_same_plan(tmp_path: Path, store: Store) -> None:
    dataset = small_dataset(tmp_path / "data", 60)
    first = make_plan(dataset, store, CostModel(), chunk_samples=10, max_prompt_tokens=512)
    for sample in dataset.take(range(20)):
        commit(store, sample.input_ids_s.astype(np.int64))
    assert make_plan(dataset, store, CostModel(), chunk_samples=7, max_prompt_tokens=512) == first
    assert load_plan(store.root, dataset.record.dataset_id) == first


def test_plan_partly_filled_store_brings_only_what_is_missing(tmp_path: Path, store: Store) -> None:
    dataset = small_dataset(tmp_path / "data", 60)
    for sample in dataset.take(range(0, 60, 2)):
        commit(store, sample.input_ids_s.astype(np.int64))
    plan = make_plan(dataset, store, CostModel(), chunk_samples=10, max_prompt_tokens=512)
    assert plan.already_stored == 30
    assert sorted(planned_rows(store, dataset, len(plan.chunks))) == list(range(1, 60, 2))


def test_gate_counts_a_state_that_an_earlier_dataset_brought_and_that_was_dropped(tmp_path: Path, store: Store) -> None:
    dataset = small_dataset(tmp_path / "data", 20)
    for sample in dataset.take(range(20)):
        commit(store, sample.input_ids_s.astype(np.int64))
    plan = make_plan(dataset, store, CostModel(), chunk_samples=5, max_prompt_tokens=512)
    assert plan.chunks == () and judge(plan, store, max_error_rate=0.0).open
    store.discard({next(iter(dataset.take([4]))).state_key: "checksum"})
    plan_again(store, dataset)
    report = judge(load_plan(store.root, dataset.record.dataset_id), store, max_error_rate=0.0)
    assert not report.open and [chunk.failures[0].reason for chunk in report.failed_chunks] == ["not-attempted"]


def test_plan_state_dropped_after_planning_becomes_a_further_chunk(tmp_path: Path, store: Store) -> None:
    dataset = small_dataset(tmp_path / "data", 20)
    for sample in dataset.take(range(10)):
        commit(store, sample.input_ids_s.astype(np.int64))
    first = make_plan(dataset, store, CostModel(), chunk_samples=5, max_prompt_tokens=512)
    dropped = next(iter(dataset.take([4]))).state_key
    store.discard({dropped: "checksum"})
    second = make_plan(dataset, store, CostModel(), chunk_samples=5, max_prompt_tokens=512)
    assert second.chunks[: len(first.chunks)] == first.chunks
    assert [sample.state_key for sample in chunk_rows(store.root, first.dataset_id, len(first.chunks))] == [dropped]


def test_plan_over_long_and_unsupervised_rows_are_excluded_with_reasons(tmp_path: Path, store: Store) -> None:
    ones = np.ones(8, dtype=np.uint8)
    shared = ids_of(8, 1)
    rows = [
        (ids_of(100, 2), np.ones(100, dtype=np.uint8)),
        (ids_of(8, 3), np.zeros(8, dtype=np.uint8)),
        (shared, np.zeros(8, dtype=np.uint8)),
        (shared, ones),
    ]
    dataset = write_dataset(tmp_path / "data", rows)
    plan = make_plan(dataset, store, CostModel(), chunk_samples=10, max_prompt_tokens=99)
    assert sorted(item.reason for item in plan.excluded) == ["no-supervised-token", "no-supervised-token", "over-long"]
    assert {item.kind for item in plan.excluded} == {"excluded"}
    assert [sample.num_tokens for sample in chunk_rows(store.root, plan.dataset_id, 0)] == [8]
    assert next(item.detail for item in plan.excluded if item.reason == "over-long") == "100 tokens, the engine takes 99"


def test_plan_other_limit_keeps_chunks_and_moves_only_the_rows_concerned(tmp_path: Path, store: Store) -> None:
    rows = [(ids_of(n, n), np.ones(n, dtype=np.uint8)) for n in range(4, 44)]
    dataset = write_dataset(tmp_path / "data", rows)
    first = make_plan(dataset, store, CostModel(), chunk_samples=10, max_prompt_tokens=40)
    lower = make_plan(dataset, store, CostModel(), chunk_samples=10, max_prompt_tokens=30)
    assert [chunk.key for chunk in lower.chunks] == [chunk.key for chunk in first.chunks]
    assert len(lower.excluded) == 13
    planned = [s for c in lower.chunks for s in chunk_rows(store.root, lower.dataset_id, c.index)]
    assert max(sample.num_tokens for sample in planned) == 30
    assert sum(chunk.samples for chunk in lower.chunks) == len(planned) == 27
    higher = make_plan(dataset, store, CostModel(), chunk_samples=10, max_prompt_tokens=50)
    assert [chunk.key for chunk in higher.chunks][: len(first.chunks)] == [chunk.key for chunk in first.chunks]
    planned = [s for c in higher.chunks for s in chunk_rows(store.root, lower.dataset_id, c.index)]
    assert sorted(sample.num_tokens for sample in planned) == list(range(4, 44))
    assert higher.excluded == ()


def test_plan_nothing_missing_has_no_chunks(tmp_path: Path, store: Store) -> None:
    dataset = small_dataset(tmp_path / "data", 5)
    for sample in dataset.samples():
        commit(store, sample.input_ids_s.astype(np.int64))
    plan = make_plan(dataset, store, CostModel(), chunk_samples=5, max_prompt_tokens=512)
    assert plan.chunks == ()
    assert make_plan(dataset, store, CostModel(), chunk_samples=5, max_prompt_tokens=512) == plan


def test_plan_missing_or_unknown_chunk_says_what_to_do(tmp_path: Path, store: Store) -> None:
    with pytest.raises(InputError, match="drafter-data plan"):
        load_plan(store.root, "0" * 40)
    dataset = small_dataset(tmp_path / "data", 5)
    plan = make_plan(dataset, store, CostModel(), chunk_samples=5, max_prompt_tokens=512)
    with pytest.raises(InputError, match="no chunk 1"):
        chunk_rows(store.root, plan.dataset_id, 1)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 50, 200, 1000])
def test_order_inside_a_chunk_keeps_lengths_apart(count: int) -> None:
    rng = np.random.default_rng(count)
    tokens_n = rng.integers(8, 512, count)
    order = neighbours_differ(tokens_n)
    assert sorted(order.tolist()) == list(range(count))
    ordered = tokens_n[order]
    window = min(16, count // 8)
    clashes = sum(len(set(ordered[k : k + window].tolist())) < window for k in range(count - window + 1)) if window > 1 else 0
    assert clashes == 0
