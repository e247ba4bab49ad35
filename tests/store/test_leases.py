"""Leases: one holder a chunk, named; a dead one's ends by itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drafter_data.errors import LeaseHeld
from drafter_data.store import leases
from drafter_data.store.leases import Lease
from drafter_data.store.store import Store
from tests.store.making import identity_of

KEY = "c" * 40
HOLDER = """
import sys, time
from pathlib import Path
from drafter_data.store.store import Store
with Store.open(Path(sys.argv[1])).lease(sys.argv[2], "run one"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store", identity_of())


def test_lease_of_a_living_process_is_refused_with_its_holder_and_taken_over_after_sigkill(store: Store) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(store.root), KEY], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "held\n"
        with pytest.raises(LeaseHeld, match="held by run one"), store.lease(KEY, "run two"):
            pass
        assert [(lease.holder, live) for lease, live in store.leases().values()] == [("run one", True)]
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert [(lease.holder, live) for lease, live in store.leases().values()] == [("run one", False)]
    with store.lease(KEY, "run two"):
        assert [(lease.holder, live) for lease, live in store.leases().values()] == [("run two", True)]
    assert store.leases() == {}


def test_lease_within_one_process_is_refused_twice_and_given_back_after_an_error(store: Store) -> None:
    with pytest.raises(RuntimeError), store.lease(KEY, "first"):
        with pytest.raises(LeaseHeld), store.lease(KEY, "second"):
            pass
        raise RuntimeError
    with store.lease(KEY, "second"):
        pass


def test_lease_of_another_host_is_kept_until_it_expires(store: Store) -> None:
    path = store.root / "leases" / f"{KEY}.json"
    for seconds, live in ((30, True), (-1, False)):
        path.write_text(
            Lease(holder="far", host="elsewhere", process="b/1/2/3", expires_at=time.time() + seconds).model_dump_json()
        )
        assert [alive for _, alive in store.leases().values()] == [live]
    with store.lease(KEY, "here"):
        pass


def test_lease_of_a_host_whose_clock_is_ahead_ends_when_it_is_not_renewed(store: Store) -> None:
    assert leases.LEASE_SECONDS <= 60
    path = store.root / "leases" / f"{KEY}.json"
    for renewals in range(2):  # what its holder renews, it keeps
        expires_at = time.time() + 3600 + renewals
        far = Lease(holder="far", host="elsewhere", process="b/1/2/3", expires_at=expires_at, seconds=0.6)
        path.write_text(far.model_dump_json())
        with pytest.raises(LeaseHeld), store.lease(KEY, "here"):
            pass
    seen = time.monotonic()
    while True:
        with contextlib.suppress(LeaseHeld), store.lease(KEY, "here"):
            break
        time.sleep(0.02)
    assert 0.5 < time.monotonic() - seen < 5


def test_lease_of_a_process_in_another_pid_namespace_is_not_taken_for_dead(store: Store) -> None:
    """Two containers of one host: each sees other processes, or none, under the other's process ids."""
    inside = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", HOLDER, str(store.root), KEY]
    child = subprocess.Popen(
        inside,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert child.stdout is not None and child.stderr is not None
        if child.stdout.readline() != "held\n":
            pytest.skip(f"cannot make a pid namespace here: {child.stderr.read().strip()}")
        with pytest.raises(LeaseHeld, match="held by run one"), store.lease(KEY, "run two"):
            pass
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
    lease, live = store.leases()[KEY]
    assert live, "nobody can tell from here"
    assert lease.expires_at <= time.time() + 60, "but it ends by itself"


def test_lease_is_renewed_while_it_is_held(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.02)
    with store.lease(KEY, "here"):
        first = store.leases()[KEY][0].expires_at
        deadline = time.monotonic() + 10
        while store.leases()[KEY][0].expires_at <= first:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    store.close()
