"""The short soak; `make soak` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.soak import soak


@pytest.mark.timeout(280)
@pytest.mark.parametrize("labelled", [True, False], ids=["labelled", "unlabelled"])
def test_soak_short_under_all_transient_faults_and_kills_gives_the_quiet_bytes(tmp_path: Path, labelled: bool) -> None:
    found = soak(tmp_path, samples=150, seconds=1, kill_every_seconds=2, seed=3 + labelled, labelled=labelled)
    assert found.client_kills + found.engine_kills > 0
    assert (found.different, found.left) == ([], [])
