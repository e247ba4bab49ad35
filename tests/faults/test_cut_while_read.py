"""A dump that is cut, or written anew in place, between its claim and its commit: an error like any other, not a SIGBUS."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own: what this guards against ends the process, whatever it catches.
CHILD = """
import os, sys, time
from pathlib import Path
from drafter_data.claiming.folder import DumpFolder
from drafter_data.claiming.labelled import LabelledClaims
from drafter_data.engines.base import PrefillReply, PrefillRequest
from drafter_data.engines.vllm import open_dump
from drafter_data.errors import DumpRejected
from drafter_data.store.store import Store
from tests.store.making import identity_of, ids_of, key_of, labelled_dump

root, way, left = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
ids = ids_of(3000, 1)
(root / "dumps").mkdir(mode=0o700)
folder, identity = DumpFolder.open(root / "dumps"), identity_of()
store = Store.open(root / "store", identity)
request = PrefillRequest("dd-aaaaaaaa-1", key_of(ids), ids)
try:
    path = labelled_dump(root / "dumps", ids, request.request_id)
    if way == "labelled":
        reply = PrefillReply(request.request_id, len(ids), 0, time.time(), 0.0)
        dump = LabelledClaims(folder, identity, "aaaaaaaa").claim(request, reply, time.monotonic() + 1)
    else:
        dump = open_dump(folder, path.name, request, identity)
    os.truncate(path, left)
    store.commit(dump, request.state_key, ids)
except DumpRejected as error:
    print(error.reason, list(store.root.glob("states/*/*")), len(store))
"""


@pytest.mark.parametrize("left", [1_000_000, 30_000])
@pytest.mark.parametrize("way", ["labelled", "vllm"])
def test_dump_cut_between_claim_and_commit_is_malformed_and_the_process_lives(tmp_path: Path, way: str, left: int) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", CHILD, str(tmp_path), way, str(left)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (child.returncode, child.stderr) == (0, "")
    assert child.stdout == "dump-malformed [] 0\n"
