"""The dump folder: whose it may be, what a sweep may take, and who may hold it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_contracts.dump import name_of
from data_contracts.identity import StoreIdentity
from drafter_data.claiming.folder import DumpFolder
from drafter_data.claiming.labelled import LabelledClaims
from drafter_data.engines.base import PrefillReply, PrefillRequest
from drafter_data.errors import LeaseHeld, PreflightRefused
from drafter_data.store.store import Store
from tests.store import making

IDENTITY = StoreIdentity(weights_digest="w", num_layers=8, hidden_size=4, layers=(2, 8), dtype="F32")


def folder_of(path: Path) -> DumpFolder:
    """A dump folder that is ours."""
    path.mkdir(mode=0o700, exist_ok=True)
    return DumpFolder.open(path)


def labelled_dump(folder: Path, request_id: str) -> Path:
    """A file with the label of a request (its tensors do not matter to a sweep)."""
    header = json.dumps({"__metadata__": {"rid": request_id}}).encode()
    path = folder / name_of(request_id, 0, 1)
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    return path


@pytest.mark.parametrize(("mode", "reason"), [(0o755, "dump-folder-not-ours"), (0o770, "dump-folder-not-ours")])
def test_dump_folder_open_to_others_is_refused(tmp_path: Path, mode: int, reason: str) -> None:
    path = tmp_path / "dumps"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(PreflightRefused, match="chmod 700") as caught:
        DumpFolder.open(path)
    assert caught.value.reason == reason


def test_dump_folder_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(PreflightRefused, match="no link"):
        DumpFolder.open(tmp_path / "link")


def test_sweep_takes_dead_runs_and_leaves_living_and_foreign_files(tmp_path: Path) -> None:
    dumps = tmp_path / "dumps"
    living = LabelledClaims(folder_of(dumps), IDENTITY, "aaaaaaaa")
    kept = [labelled_dump(dumps, living.request_id(1)), labelled_dump(dumps, "somebody-else")]
    dead = labelled_dump(dumps, "dd-bbbbbbbb-7")
    (dumps / ".dd-run-cccccccc.lock").touch()
    own = LabelledClaims(folder_of(dumps), IDENTITY, "dddddddd")
    kept.append(labelled_dump(dumps, own.request_id(1)))
    assert own.sweep() == 1
    assert not dead.exists()
    assert all(path.exists() for path in kept)
    assert not (dumps / ".dd-run-cccccccc.lock").exists()
    assert (dumps / ".dd-run-aaaaaaaa.lock").exists()


def test_dump_that_has_moved_into_the_store_has_no_entry_left(tmp_path: Path) -> None:
    ids, folder = making.ids_of(20, 1), folder_of(tmp_path / "dumps")
    claims = LabelledClaims(folder, making.identity_of(), "aaaaaaaa")
    request = PrefillRequest(claims.request_id(1), making.key_of(ids), ids)
    path = making.labelled_dump(tmp_path / "dumps", ids, request.request_id)
    dump = claims.claim(request, PrefillReply(request.request_id, len(ids), 0, 0.0, 0.0), time.monotonic() + 1)
    assert list(dump.entries) == [path.name]
    store = Store.open(tmp_path / "store", making.identity_of())
    store.commit(dump, request.state_key, ids)
    assert list(dump.entries) == []
    assert not path.exists()


def test_lock_second_owner_is_refused_with_the_holder_named(tmp_path: Path) -> None:
    dumps = tmp_path / "dumps"
    folder_of(dumps).lock("owner.lock", "run 1, process 42")
    code = (
        "import sys; from pathlib import Path; from drafter_data.claiming.folder import DumpFolder\n"
        "DumpFolder.open(Path(sys.argv[1])).lock('owner.lock', 'run 2')"
    )
    second = subprocess.run([sys.executable, "-c", code, str(dumps)], capture_output=True, text=True, check=False)
    assert "run 1, process 42" in second.stderr
    with pytest.raises(LeaseHeld):
        folder_of(dumps).lock("owner.lock", "run 3")
