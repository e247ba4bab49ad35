"""The short soak of the whole flow under a real Prefect server; `make soak` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.local.services import Services
from tests.faults.soak import soak


@pytest.mark.timeout(280)
def test_soak_of_the_flow_under_faults_and_kills_gives_the_quiet_bytes(services: Services, tmp_path: Path) -> None:
    found = soak(tmp_path, samples=60, seconds=1, kill_every_seconds=3, seed=5, prefect=services.environment())
    assert found.client_kills + found.engine_kills > 0
    assert (found.different, found.left) == ([], [])
