"""The tiny model and its answers, made once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from drafter_data.dataset import Dataset
from drafter_data.embedded.checkpoint import ensure_checkpoint
from drafter_data.embedded.llama import Llama
from drafter_data.store.store import Store
from tests.trainers.world import Row, World, make_world, own_answers


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def answers(model: Path) -> list[Row]:
    return own_answers(Llama.load(model), 60, seed=1)


@pytest.fixture(scope="session")
def shared_world(tmp_path_factory: pytest.TempPathFactory, model: Path, answers: list[Row]) -> World:
    """Sixty samples that no test may change."""
    return make_world(tmp_path_factory.mktemp("world"), model, answers)


@pytest.fixture(scope="session")
def small_world(tmp_path_factory: pytest.TempPathFactory, model: Path, answers: list[Row]) -> Path:
    """Twenty-four samples to copy."""
    folder = tmp_path_factory.mktemp("small-world")
    make_world(folder, model, answers[:24])
    return folder


@pytest.fixture
def world(tmp_path: Path, model: Path, small_world: Path) -> World:
    """Twenty-four samples for a test to damage."""
    shutil.copytree(small_world, tmp_path / "world")
    return World(model, Dataset.open(tmp_path / "world/dataset"), Store.open(tmp_path / "world/store"))
