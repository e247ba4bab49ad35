"""What all tests share: signals as at a terminal, and the small checkpoint that the embedded engine makes from a seed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from drafter_data.embedded.checkpoint import ensure_checkpoint


def pytest_configure() -> None:
    """What a shell started in the background ignores SIGINT, and so does all that comes from it: no test could send it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint folder of the embedded engine's model (8 layers, hidden 64, vocabulary 1,024)."""
    return ensure_checkpoint(tmp_path_factory.mktemp("model") / "small")
