"""Every switch of the fault engine, with labelled and unlabelled dumps, one and sixteen requests in flight.

Nothing wrong is committed, nothing is lost without a reason, and the reason is the right one. The table is docs/fault-matrix.md.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from drafter_data.embedded.llama import Llama
from drafter_data.store.store import Store
from tests.faults.cells import Bench, Setting, bench
from tests.faults.switches import ROWS
from tests.support.datasets import random_prompts, write_dataset
from tests.support.reference import ReferenceModel

TABLE = Path(__file__).parents[2] / "docs" / "fault-matrix.md"
SETTINGS = tuple(Setting(labelled, in_flight) for labelled in (True, False) for in_flight in (1, 16))
LAYERS = (2, 4, 5, 8)


def run_column(made: Bench) -> dict[str, str]:
    outcomes = dict[str, str]()
    for row in ROWS:
        try:
            outcomes[row.name] = row.run(made)
        except Exception as error:  # one broken cell must not hide the others
            outcomes[row.name] = f"broke: {type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return outcomes


def check_quiet_run(made: Bench, model: Llama, reference: ReferenceModel) -> None:
    """The measure itself is right: our own forward pass for all, transformers for some."""
    store = Store.open(made.folder / "store1")
    for number, sample in enumerate(made.dataset.samples()):
        found_slh = store.read(sample.state_key).states_slh
        assert np.abs(found_slh - model.forward(sample.input_ids_s.astype(np.int64), LAYERS)).max() < 1e-4
        if number < 3:
            assert np.abs(found_slh - reference.states(sample.input_ids_s.tolist(), LAYERS)).max() < 1e-4


@pytest.mark.timeout(580)
def test_fault_matrix_commits_nothing_wrong_and_names_every_loss(small_model: Path, tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "dataset", [p[:n] for n, p in enumerate(random_prompts(16, 60, 60, seed=11), start=12)])
    model, reference = Llama.load(small_model), ReferenceModel(small_model)

    def column(setting: Setting) -> tuple[dict[str, str], Bench]:
        with bench(setting, small_model, dataset, tmp_path / setting.title.replace(" ", "-")) as made:
            check_quiet_run(made, model, reference)
            return run_column(made), made

    with ThreadPoolExecutor(len(SETTINGS)) as pool:
        columns = list(pool.map(column, SETTINGS))
    for made in (made for _, made in columns):
        print(f"{made.setting.title}: {made.committed} states committed, {made.wrong} wrong, {made.unexplained} without a reason")
    table = render([outcomes for outcomes, _ in columns])
    differs = not TABLE.is_file() or TABLE.read_text() != table
    if differs:
        TABLE.write_text(table)
    found = {
        (row.name, setting.title): outcomes[row.name]
        for (outcomes, _), setting in zip(columns, SETTINGS, strict=True)
        for row in ROWS
        if outcomes[row.name] != row.expected(setting.labelled)
    }
    assert found == {}
    assert [(made.wrong, made.unexplained) for _, made in columns] == [(0, 0)] * len(SETTINGS)
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
        "What content cannot show: one request whose aux layers are its neighbours' (`shifted-layer`) is only seen when that",
        "very sample is extracted again, which happens to `recheck_samples` of each chunk; the row above extracts all twice.",
        "From the start it is refused where a reference is at hand, which is for Llama models of up to 2 GiB.",
    ]
    return "\n".join(lines) + "\n"
