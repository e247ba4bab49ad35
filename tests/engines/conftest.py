"""Fixtures of the tests against real engines (marker real_engine, `make test-real`)."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from tests.engines.servers import Engines
from tests.engines.tiny_models import make_deepseek, make_kimi, make_llama, make_qwen3

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A server's start and a full sample set take longer than the suite's limit for one test."""
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("real_engine"):
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny checkpoints by name, made from seeds."""
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": make_llama(root / "llama"),
        "qwen3": make_qwen3(root / "qwen3"),
        "deepseek": make_deepseek(root / "deepseek"),
        "kimi": make_kimi(root / "kimi"),
    }


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Generator[Engines]:
    """The one running engine."""
    found = Engines(tmp_path_factory.mktemp("engine-logs"))
    yield found
    found.stop()
