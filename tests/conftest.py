"""What all tests share: the small checkpoint that the embedded engine makes from a seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafter_data.embedded.checkpoint import ensure_checkpoint


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint folder of the embedded engine's model (8 layers, hidden 64, vocabulary 1,024)."""
    return ensure_checkpoint(tmp_path_factory.mktemp("model") / "small")
