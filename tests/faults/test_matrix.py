"""Every switch of the fault engine, with labelled and unlabelled dumps, one and sixteen requests in flight.

Nothing wrong is committed, nothing is lost without a reason, and the reason is the right one. The table is docs/fault-matrix.md.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from drafter_data.dataset import Dataset
from drafter_data.embedded.llama import Llama
from drafter_data.store.store import Store
from tests.faults.cells import Setting, bench
from tests.faults.switches import ROWS
from tests.support.datasets import random_prompts, write_dataset
from tests.support.reference import ReferenceModel

TABLE = Path(__file__).parents[2] / "docs" / "fault-matrix.md"
SETTINGS = tuple(Setting(labelled, in_flight) for labelled in (True, False) for in_flight in (1, 16))
LAYERS = (2, 4, 5, 8)


@dataclass(frozen=True)
class Column:
    """What came of each row in one setting, and what was counted."""

    setting: Setting
    outcomes: dict[str, str]
    committed: int
    wrong: int
    unexplained: int


def run_column(setting: Setting, model: Path, dataset: Path, folder: Path) -> Column:
    """In a process of its own: four clients in one would wait for each other more than for their engines."""
    outcomes = dict[str, str]()
    with bench(setting, model, Dataset.open(dataset), folder) as made:
        for row in ROWS:
            try:
                outcomes[row.name] = row.run(made)
            except Exception as error:  # one broken cell must not hide the others
                outcomes[row.name] = f"broke: {type(error).__name__}: {' '.join(str(error).split())[:120]}"
        return Column(setting, outcomes, made.committed, made.wrong, made.unexplained)


def check_quiet_run(folder: Path, dataset: Dataset, model: Llama, reference: ReferenceModel) -> None:
    """The measure itself is right: our own forward pass for all, transformers for some."""
    store = Store.open(folder / "store1")
    for number, sample in enumerate(dataset.samples()):
        found_slh = store.read(sample.state_key).states_slh
        assert np.abs(found_slh - model.forward(sample.input_ids_s.astype(np.int64), LAYERS)).max() < 1e-4
        if number < 3:
            assert np.abs(found_slh - reference.states(sample.input_ids_s.tolist(), LAYERS)).max() < 1e-4


@pytest.mark.timeout(1200)
def test_fault_matrix_commits_nothing_wrong_and_names_every_loss(small_model: Path, tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "dataset", [p[:n] for n, p in enumerate(random_prompts(16, 60, 60, seed=11), start=12)])
    folders = [tmp_path / setting.title.replace(" ", "-") for setting in SETTINGS]
    with ProcessPoolExecutor(len(SETTINGS), mp_context=get_context("spawn")) as pool:
        running = [
            pool.submit(run_column, setting, small_model, dataset.folder, folder)
            for setting, folder in zip(SETTINGS, folders, strict=True)
        ]
        columns = [column.result() for column in running]
    model, reference = Llama.load(small_model), ReferenceModel(small_model)
    for column, folder in zip(columns, folders, strict=True):
        check_quiet_run(folder, dataset, model, reference)
        print(f"{column.setting.title}: {column.committed} states committed, {column.wrong} wrong, "
              f"{column.unexplained} without a reason")  # fmt: skip
    found = {
        (row.name, column.setting.title): column.outcomes[row.name]
        for column in columns
        for row in ROWS
        if column.outcomes[row.name] != row.expected(column.setting.labelled)
    }
    assert found == {}
    assert [(column.wrong, column.unexplained) for column in columns] == [(0, 0)] * len(SETTINGS)
    table = render([column.outcomes for column in columns])
    differs = not TABLE.is_file() or TABLE.read_text() != table
    if differs:
        TABLE.write_text(table)
    assert not differs, f"{TABLE} was not the outcome; it is written anew: commit it"


def render(columns: list[dict[str, str]]) -> str:
    """The table of outcomes."""
    lines = [
        "# What comes of each fault",
        "",
        "Written by `tests/faults/test_matrix.py`: every switch of the fault engine (`engine embedded --faults`) against the",
        "extraction, with every committed state compared with the bytes of a quiet run. In each cell: 0 wrong states committed, 0",
        "samples lost without a reason. *All right*: every sample was stored, if need be at a further attempt. *Failed*: the",
        "prompts that the fault hits every time fail with that reason, all others are stored. *Stopped*: the run ended with that",
        "reason; `canary-...` is the preflight's, before the first sample is sent.",
        "",
        "| fault | what it does | " + " | ".join(setting.title for setting in SETTINGS) + " |",
        "|---|---|" + "---|" * len(SETTINGS),
    ]
    lines += [f"| {row.name} | {row.what} | " + " | ".join(outcomes[row.name] for outcomes in columns) + " |" for row in ROWS]
    lines += [
        "",
        "With the same four settings `tests/faults/test_resources.py` fills the dump folder (*failed: dump-folder-full*) and the",
        "store (*stopped: store-full*), and makes the store read-only (*stopped: store-read-only*); each goes on afterwards.",
        "",
        "Layers that are their neighbours' (`shifted-layer`) pass every check of a single dump. From the start they are refused",
        "where a reference is at hand, which is for Llama models of up to 2 GiB. From some moment on they stop the run at the end",
        "of the chunk in which it happens (*engine-changed*, `tests/faults/test_engine_changes.py`): each chunk asks again for a",
        "state of the run's beginning. In one single request they are seen by validation, against the store's other samples, from",
        "about 90 tokens on (`tests/validation/test_mutations.py`), or when that very sample is extracted again, which happens to",
        "`recheck_samples` of each chunk: with 1 of 200, the default, to one in 200; the row above extracts all twice.",
    ]
    return "\n".join(lines) + "\n"
