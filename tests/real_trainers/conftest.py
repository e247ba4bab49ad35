"""A store extracted by the pipeline from the embedded engine, and the environment of the real trainers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from drafter_data.dataset import Dataset
from drafter_data.embedded.checkpoint import ensure_checkpoint
from drafter_data.embedded.llama import Llama
from drafter_data.files import existing_parent
from drafter_data.store.store import Store
from tests.support.engines import running_engine
from tests.trainers.test_defects import DEFECTS, damage, forge_receipt
from tests.trainers.world import World, own_answers

SAMPLES = 200
NEEDED_BYTES = 4 << 30


@dataclass(frozen=True)
class Pipeline:
    """What the pipeline left, by its commands alone."""

    model: Path
    dataset: Path
    store: Path


def command(*arguments: object) -> None:
    """Runs a command of ours; fails with its output."""
    done = subprocess.run([sys.executable, "-m", "drafter_data", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def trainer_python() -> Path:
    """The interpreter of the environment that setup.sh makes, once a machine."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "drafter-data" / "trainers"
    python = sys.executable if sys.version_info[:2] == (3, 11) else shutil.which("python3.11")
    if python is None:
        pytest.skip("the trainers' environment needs python3.11 on PATH")
    if not (folder / ".complete").exists() and shutil.disk_usage(existing_parent(folder)).free < NEEDED_BYTES:
        pytest.skip(f"the trainers' environment needs {NEEDED_BYTES >> 30} GiB free at {folder}")
    done = subprocess.run([Path(__file__).with_name("setup.sh"), folder, python], capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"setup.sh failed: {done.stderr[-1500:]}")
    return folder / "bin" / "python"


@dataclass(frozen=True)
class Damaged:
    """The same with one sample spoilt in each way that the trainers' readers let through: reasons that may be given, by sample."""

    world: World
    expected: dict[str, set[str]]


@pytest.fixture(scope="session")
def damaged(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Damaged:
    store = tmp_path_factory.mktemp("damaged") / "store"
    shutil.copytree(pipeline.store, store)
    world = World(pipeline.model, Dataset.open(pipeline.dataset), Store.open(store))
    expected: dict[str, set[str]] = {}
    for n, (name, defect) in enumerate(DEFECTS.items()):
        for row, forged in ((7 * n, False), (7 * n + 3, True)):
            path = damage(world, row, name)
            if forged:
                forge_receipt(world.store, path.stem)
            # A dump's header is padded, a defect's is not: by its own receipt it is of another size.
            expected[world.key(row)] = defect.forged_as | (set() if forged else {*defect.caught_as, "state-size"})
    return Damaged(world, expected)


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    folder = tmp_path_factory.mktemp("pipeline")
    model = ensure_checkpoint(folder / "model")
    rows = own_answers(Llama.load(model), SAMPLES, seed=1, shortest=46)  # of one length: steps can then be compared
    lines = [json.dumps({"input_ids": ids_s.tolist(), "loss_mask": mask_s.tolist()}) for ids_s, mask_s in rows]
    (folder / "run.jsonl").write_text("\n".join(lines) + "\n")
    command("merge", folder / "run.jsonl", "--out", folder / "dataset")
    with running_engine(model) as engine:
        command("extract", folder / "dataset", "--store", folder / "store", "--url", engine.url, "--kind", "embedded")
    return Pipeline(model, folder / "dataset", folder / "store")
