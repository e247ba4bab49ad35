"""The rows that are new in a version, as a dataset of their own; and the record of nights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_contracts.identity import dataset_id
from data_contracts.refresh import NIGHTS_FILE, Night
from drafter_data.dataset import Dataset
from drafter_data.errors import StoreFull
from drafter_data.refresh.delta import new_rows, write_delta
from drafter_data.refresh.nights import append_night, read_nights
from drafter_data.workspace import Workspace
from tasks.refresh import logged_night
from tests.support.datasets import random_prompts, write_dataset


def keys(dataset: Dataset) -> list[str]:
    return [sample.sample_key for sample in dataset.samples()]


def test_delta_holds_exactly_the_new_rows_as_they_are_in_the_version(tmp_path: Path) -> None:
    prompts = random_prompts(50, 8, 40, seed=1)
    earlier = write_dataset(tmp_path / "earlier", prompts[:30], group_rows=7)
    grown = write_dataset(tmp_path / "grown", prompts, group_rows=7)
    new_r = new_rows(grown, earlier)
    delta = write_delta(grown, new_r, tmp_path / "deltas")

    expected = sorted(set(keys(grown)) - set(keys(earlier)))
    assert keys(delta) == expected and len(expected) == 20
    assert delta.record.dataset_id == dataset_id(expected) == delta.folder.name
    rows = {sample.sample_key: sample for sample in grown.samples()}
    for sample in delta.samples():
        assert np.array_equal(sample.input_ids_s, rows[sample.sample_key].input_ids_s)
        assert np.array_equal(sample.loss_mask_s, rows[sample.sample_key].loss_mask_s)
    lengths = [sample.tokens for sample in delta.samples()]
    record = delta.record
    assert (record.rows, record.tokens, record.longest_tokens, record.distinct_states) == (20, sum(lengths), max(lengths), 20)
    assert record.supervised_tokens == sum(int(sample.loss_mask_s.sum()) for sample in delta.samples())

    again = write_delta(grown, new_r, tmp_path / "deltas")
    assert again.folder == delta.folder and [path.name for path in (tmp_path / "deltas").iterdir()] == [record.dataset_id]


def test_delta_beside_no_earlier_version_is_every_row(tmp_path: Path) -> None:
    grown = write_dataset(tmp_path / "grown", random_prompts(9, 8, 20))
    assert new_rows(grown, None).all()
    assert keys(write_delta(grown, new_rows(grown, None), tmp_path / "deltas")) == keys(grown)


def test_nights_survive_a_torn_line(tmp_path: Path) -> None:
    append_night(tmp_path, Night(started_at=1.0, run="one", outcome="extracted", extracted=3))
    with (tmp_path / NIGHTS_FILE).open("a") as handle:
        handle.write('{"started_at": 2.0, "run": "tw')
    append_night(tmp_path, Night(started_at=3.0, run="three"))
    assert [(night.run, night.extracted) for night in read_nights(tmp_path)] == [("one", 3), ("three", 0)]


def test_night_whose_line_cannot_be_written_ends_as_it_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / NIGHTS_FILE).mkdir()
    workspace = Workspace(tmp_path, tmp_path / "store")
    with logged_night(workspace):
        pass
    with pytest.raises(StoreFull, match="the night's own"), logged_night(workspace):
        raise StoreFull("the night's own")
    assert caplog.text.count("the record of this night is not complete") == 2
