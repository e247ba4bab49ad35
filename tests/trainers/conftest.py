"""The tiny model and its answers, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafter_data.embedded.checkpoint import ensure_checkpoint
from drafter_data.embedded.llama import Llama
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


@pytest.fixture
def world(tmp_path: Path, model: Path, answers: list[Row]) -> World:
    """Twenty-four samples for a test to damage."""
    return make_world(tmp_path / "world", model, answers[:24])
