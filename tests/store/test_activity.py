"""Runs that work on a store: who may come beside whom, and what a dead one leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drafter_data.errors import InputError, LeaseHeld
from drafter_data.store.activity import Beside, activity_of, forget_activity, working
from drafter_data.store.leases import Lease

WORKER = """
import sys, time
from pathlib import Path
from drafter_data.store.activity import Beside, working
with working(Path(sys.argv[1]), "run one", beside=Beside(sys.argv[2]), key=sys.argv[3] or None):
    print("working", flush=True)
    time.sleep(600)
"""


@contextmanager
def another_process(store: Path, beside: Beside = Beside.OTHERS, key: str = "", **variables: str) -> Generator[None]:
    argv = [sys.executable, "-c", WORKER, str(store), beside.value, key]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])} | variables
    process = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "working\n"
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_runs_that_extract_work_side_by_side_and_leave_nothing(tmp_path: Path) -> None:
    with working(tmp_path, "one"), working(tmp_path, "two"):
        assert len(list((tmp_path / "leases").glob("*.json"))) == 2
    assert not list((tmp_path / "leases").iterdir())


@pytest.mark.parametrize("beside", [Beside.ALONE_AT_FIRST, Beside.ALONE])
def test_run_that_must_be_alone_is_refused_beside_another_and_goes_after_its_death(tmp_path: Path, beside: Beside) -> None:
    with another_process(tmp_path):
        with pytest.raises(LeaseHeld, match="run one") as refused, working(tmp_path, "two", beside=beside):
            pass
        assert refused.value.reason == "store-busy"
    with working(tmp_path, "two", beside=beside):
        pass
    assert not list((tmp_path / "leases").iterdir()), "the dead run's lease was taken away"


def test_run_beside_the_nightly_one_is_taken_and_beside_a_removal_refused(tmp_path: Path) -> None:
    with another_process(tmp_path, Beside.ALONE_AT_FIRST), working(tmp_path, "by hand"):
        pass
    with another_process(tmp_path, Beside.ALONE), pytest.raises(LeaseHeld), working(tmp_path, "by hand"):
        pass


def test_chunk_of_another_host_counts_as_work_until_its_lease_ends(tmp_path: Path) -> None:
    (tmp_path / "leases").mkdir()
    lease = Lease(holder="far", host="elsewhere", process="b/1/2", expires_at=time.time() + 30)
    (tmp_path / "leases" / f"{'c' * 40}.json").write_text(lease.model_dump_json())
    with pytest.raises(LeaseHeld, match="far on elsewhere"), working(tmp_path, "nightly", beside=Beside.ALONE_AT_FIRST):
        pass


def test_named_run_is_live_then_ended_for_whoever_asks_and_gone_once_forgotten(tmp_path: Path) -> None:
    assert activity_of(tmp_path, "one") == "none"
    with another_process(tmp_path, key="one"):
        assert activity_of(tmp_path, "one") == "live"
    with working(tmp_path, "two"):
        assert activity_of(tmp_path, "one") == "ended", "the next run does not take it away"
    forget_activity(tmp_path, "one")
    assert activity_of(tmp_path, "one") == "none"


def test_host_of_another_name_is_believed_until_its_own_lease_time_is_over(tmp_path: Path) -> None:
    with another_process(tmp_path, key="one", DRAFTER_DATA_HOST_NAME="far", DRAFTER_DATA_LEASE_SECONDS="5"):
        deadline = time.monotonic() + 7
        while time.monotonic() < deadline:
            assert activity_of(tmp_path, "one") == "live", "it is renewed"
            time.sleep(0.1)
    killed = time.monotonic()
    assert activity_of(tmp_path, "one") == "live", "this host cannot see that it is gone"
    while activity_of(tmp_path, "one") == "live":
        assert time.monotonic() - killed < 15
        time.sleep(0.05)


def test_store_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError) as refused, working(tmp_path / "file" / "store", "run"):
        pass
    assert refused.value.reason == "store-not-writable"
