"""SIGKILL before every system call of a commit, and what a restart makes of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from drafter_data.claiming.folder import DumpFolder
from drafter_data.claiming.labelled import LabelledClaims
from drafter_data.files import TEMPORARY_PREFIX
from drafter_data.store.fsck import fsck
from drafter_data.store.store import Store
from drafter_data.validation import validate_store
from tests.store.making import commit, identity_of, ids_of, key_of

CHILD = """
import os, signal, sys, threading, time
from pathlib import Path
from drafter_data.claiming.folder import DumpFolder
from drafter_data.claiming.labelled import LabelledClaims
from drafter_data.engines.base import PrefillReply, PrefillRequest
from drafter_data.store.store import Store
from tests.store.making import dump_of, identity_of, ids_of, key_of, labelled_dump

STEPS = {"open", "write", "pwrite", "fsync", "fchmod", "chmod", "link", "replace", "rename", "unlink", "fcntl", "mkdir"}

def claimed(dumps, ids):
    dumps.mkdir(mode=0o700)
    claims = LabelledClaims(DumpFolder.open(dumps), identity_of(), "aaaaaaaa")
    request = PrefillRequest(claims.request_id(1), key_of(ids), ids)
    labelled_dump(dumps, ids, request.request_id)
    reply = PrefillReply(request.request_id, len(ids), 0, time.time(), 0.0)
    return claims.claim(request, reply, time.monotonic() + 5)

def commit(root, way, kill_at):
    \"\"\"Commits, and is gone before step `kill_at`; returns the names of the steps.\"\"\"
    seen = []

    def before_call(frame, event, function):
        name = getattr(function, "__name__", "")
        if event == "c_call" and name in STEPS:
            if len(seen) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            seen.append(name)

    root.mkdir()
    store = Store.open(root / "store", identity_of())
    ids = ids_of(20, 1)
    dump = claimed(root / "dumps", ids) if way == "link" else dump_of(ids)
    threading.setprofile(before_call)  # of the thread that settles it
    sys.setprofile(before_call)
    store.commit(dump, key_of(ids), ids, chunk="c")
    sys.setprofile(None)
    return seen

folder, way = Path(sys.argv[1]), sys.argv[2]
steps = commit(folder / "whole", way, -1)
for kill_at in range(len(steps)):
    child = os.fork()
    if not child:
        commit(folder / str(kill_at), way, kill_at)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, steps[kill_at]
print(" ".join(steps))
"""


@pytest.mark.parametrize("way", ["copy", "link"])
def test_commit_killed_before_each_system_call_leaves_all_or_something_that_is_swept(tmp_path: Path, way: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), way], env=environment, capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stderr
    steps = child.stdout.split()
    assert {"fsync", "fcntl"} <= set(steps)
    assert ("link" in steps) == (way == "link")
    outcomes = [outcome_of(tmp_path / str(kill_at)) for kill_at in range(len(steps))]
    # Once the receipt's line is written the state counts; nothing before it does, and nothing goes back.
    order = ["nothing", "temporary", "orphan", "committed"]
    assert outcomes == sorted(outcomes, key=order.index)
    assert {"nothing", "temporary", "orphan", "committed"} == set(outcomes), list(zip(steps, outcomes, strict=True))


def outcome_of(root: Path) -> str:
    """What the kill left; then restarts, and checks that the state is there once, right, and nothing else."""
    store = Store.open(root / "store", identity_of())
    ids = ids_of(20, 1)
    left = [path.name for path in store.root.glob("states/*/*")]
    if key_of(ids) in store:
        outcome = "committed"
        assert left == [store.path_of(key_of(ids)).name]
    elif not left:
        outcome = "nothing"
    else:
        outcome = "temporary" if left[0].startswith(TEMPORARY_PREFIX) else "orphan"
    assert len(left) <= 1
    problems = fsck(store).problems
    assert [problem.reason for problem in problems] == ([outcome] if outcome in ("temporary", "orphan") else [])
    store.sweep()
    if (root / "dumps").exists():  # the store's sweep came first: the dump's label alone must tell whose it is
        LabelledClaims(DumpFolder.open(root / "dumps"), store.identity, "bbbbbbbb").sweep()
        assert [path.name for path in (root / "dumps").iterdir()] == [".dd-run-bbbbbbbb.lock"]
    commit(store, ids)
    again = Store.open(store.root)
    report = validate_store(again, None)
    assert (report.errors, report.states, report.orphans) == (0, 1, 0)
    assert fsck(again).problems == ()
    return outcome
