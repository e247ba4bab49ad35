"""A dump folder that somebody else fills: nothing in it runs, nothing outside is touched, memory stays bounded, each names why."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_contracts.dump import name_of
from data_contracts.identity import StoreIdentity
from drafter_data.claiming.folder import DumpFolder
from drafter_data.claiming.labelled import LabelledClaims
from drafter_data.claiming.unlabelled import UnlabelledClaims
from drafter_data.engines.base import PrefillReply, PrefillRequest
from drafter_data.errors import SampleError

IDENTITY = StoreIdentity(weights_digest="w", num_layers=8, hidden_size=4, layers=(2, 8), dtype="F32")
IDS_S = np.arange(16, 22)
SECRET = b"outside, and not to be touched"


class Runs:
    """What a pickle runs when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> object:
        return (os.system, (f"touch {self.marker}",))


def sparse(path: Path, head: bytes = b"") -> None:
    with path.open("wb") as handle:
        handle.write(head)
        handle.truncate(1 << 40)


def tensors(rows: int) -> bytes:
    """A header that claims this many rows, well-formed."""
    header = {
        "token_ids": {"dtype": "I64", "shape": [rows], "data_offsets": [0, rows * 8]},
        "hidden_states": {"dtype": "F32", "shape": [rows, 2, 4], "data_offsets": [rows * 8, rows * 40]},
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


def absurd_tensors(size: str) -> bytes:
    """A header with a size that no array can have."""
    text = tensors(1)[8:].replace(b"[1]", f"[{size}]".encode()).replace(b"[0, 8]", b"[0, 0]").replace(b"[8, 40]", b"[0, 0]")
    text = text.replace(b"[1, 2, 4]", b"[0, 2, 4]")
    return len(text).to_bytes(8, "little") + text


ENTRIES: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "link": (lambda path, outside: path.symlink_to(outside / "secret"), "hostile-entry"),
    "dangling link": (lambda path, outside: path.symlink_to(outside / "nothing"), "hostile-entry"),
    "fifo": (lambda path, outside: os.mkfifo(path), "hostile-entry"),
    "folder": (lambda path, outside: path.mkdir(), "hostile-entry"),
    "another user's file": (lambda path, outside: (path.write_bytes(b"x" * 99), os.chown(path, 12345, 12345)), "hostile-entry"),
    "pickle": (lambda path, outside: path.write_bytes(pickle.dumps(Runs(outside / "ran"))), "dump-malformed"),
    "huge sparse file": (lambda path, outside: sparse(path), "dump-malformed"),
    "huge well-formed file": (lambda path, outside: sparse(path, tensors(1 << 34)), "dump-malformed"),
    "header of 2^60 bytes": (lambda path, outside: path.write_bytes((1 << 60).to_bytes(8, "little") + b"{}"), "dump-malformed"),
    "header of nothing but brackets": (
        lambda path, outside: path.write_bytes((50_000).to_bytes(8, "little") + b"[" * 50_000),
        "dump-malformed",
    ),
    "infinite size": (lambda path, outside: path.write_bytes(absurd_tensors("1e999")), "dump-malformed"),
    "size beyond an index": (lambda path, outside: path.write_bytes(absurd_tensors(f"0, {1 << 63}")), "dump-malformed"),
    "too many axes": (lambda path, outside: path.write_bytes(absurd_tensors("0" + ", 1" * 64)), "dump-malformed"),
    "empty file": (lambda path, outside: path.write_bytes(b""), "dump-malformed"),
}


def place(tmp_path: Path) -> tuple[Path, Path]:
    """A dump folder of ours and a folder outside with a secret."""
    dumps, outside = tmp_path / "dumps", tmp_path / "outside"
    dumps.mkdir(mode=0o700)
    outside.mkdir()
    (outside / "secret").write_bytes(SECRET)
    return dumps, outside


def reply_to(request: PrefillRequest) -> PrefillReply:
    return PrefillReply(request.request_id, request.tokens, 0, time.time(), 0.0)


def untouched(outside: Path) -> None:
    assert [entry.name for entry in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_bytes() == SECRET


def made(make: Callable[[Path, Path], object], path: Path, outside: Path) -> None:
    try:
        make(path, outside)
    except PermissionError:
        pytest.skip("only root can give a file to another user")


@pytest.mark.parametrize("kind", ENTRIES)
def test_labelled_dump_that_is_hostile_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    dumps, outside = place(tmp_path)
    claims = LabelledClaims(DumpFolder.open(dumps), IDENTITY, "aaaaaaaa")
    request = PrefillRequest(claims.request_id(1), "k", IDS_S)
    make, reason = ENTRIES[kind]
    made(make, dumps / name_of(request.request_id, 0, len(IDS_S)), outside)
    start = time.monotonic()
    with pytest.raises(SampleError) as caught:
        claims.claim(request, reply_to(request), start + 0.05)
    assert caught.value.reason == reason
    assert time.monotonic() - start < 5
    claims.sweep()
    untouched(outside)


@pytest.mark.parametrize("kind", ENTRIES)
def test_unlabelled_dump_that_is_hostile_is_not_taken(tmp_path: Path, kind: str) -> None:
    dumps, outside = place(tmp_path)
    claims = UnlabelledClaims(DumpFolder.open(dumps), IDENTITY, None, exclusive=True, run="aaaaaaaa")
    request = PrefillRequest(claims.request_id(1), "k", IDS_S)
    claims.before_send(request)
    folder = dumps / "req_00000001"
    folder.mkdir(mode=0o700)
    (folder / "meta.json").write_text(json.dumps({"num_tokens": len(IDS_S), "final_norm": "pre"}))
    for layer in IDENTITY.layers:
        made(ENTRIES[kind][0], folder / f"layer_{layer}.safetensors", outside)
    with pytest.raises(SampleError) as caught:
        claims.claim(request, reply_to(request), time.monotonic() + 0.05)
    assert caught.value.reason in ("dump-missing", "dump-malformed")
    untouched(outside)


@pytest.mark.parametrize(
    "meta", [b"[" * 60_000, b'{"num_tokens": 1e400}', b'{"num_tokens": "' + b"9" * 9_000 + b'"}', b"null", b"\xff"]
)
def test_unlabelled_meta_that_is_hostile_is_not_believed(tmp_path: Path, meta: bytes) -> None:
    dumps, outside = place(tmp_path)
    claims = UnlabelledClaims(DumpFolder.open(dumps), IDENTITY, None, exclusive=True, run="aaaaaaaa")
    request = PrefillRequest(claims.request_id(1), "k", IDS_S)
    claims.before_send(request)
    (dumps / "req_00000001").mkdir(mode=0o700)
    (dumps / "req_00000001" / "meta.json").write_bytes(meta)
    with pytest.raises(SampleError):
        claims.claim(request, reply_to(request), time.monotonic() + 0.1)
    untouched(outside)


def test_dump_folder_full_of_odd_names_is_swept_around(tmp_path: Path) -> None:
    dumps, outside = place(tmp_path)
    odd = ["two\nlines", "dd1-\n.safetensors", "-rf", "dd1-" + "x" * 200, "req_\n", "*"]
    for name in odd:
        (dumps / name).write_bytes(b"x")
    (dumps / "req_link").symlink_to(outside)
    (dumps / "dd1-link.safetensors").symlink_to(outside / "secret")
    labelled = LabelledClaims(DumpFolder.open(dumps), IDENTITY, "aaaaaaaa")
    assert labelled.sweep() == 0
    unlabelled = UnlabelledClaims(DumpFolder.open(dumps), IDENTITY, None, exclusive=True, run="bbbbbbbb")
    unlabelled.before_send(PrefillRequest("dd-bbbbbbbb-1", "k", IDS_S))
    labelled.close()
    assert {entry.name for entry in dumps.iterdir() if not entry.name.startswith(".")} >= {*odd, "req_link", "dd1-link.safetensors"}
    untouched(outside)


def test_dump_folder_swapped_for_a_link_while_running_is_left_alone(tmp_path: Path) -> None:
    dumps, outside = place(tmp_path)
    claims = LabelledClaims(DumpFolder.open(dumps), IDENTITY, "aaaaaaaa")
    request = PrefillRequest(claims.request_id(1), "k", IDS_S)
    dumps.rename(tmp_path / "moved")
    dumps.symlink_to(outside)
    trap = outside / name_of(request.request_id, 0, len(IDS_S))
    trap.write_bytes(b"bait")
    with pytest.raises(SampleError) as caught:
        claims.claim(request, reply_to(request), time.monotonic() + 0.1)
    assert caught.value.reason == "dump-missing"
    claims.abandon(request)
    claims.sweep()
    claims.close()
    assert trap.read_bytes() == b"bait", "what is behind the link is not ours"
    trap.unlink()
    untouched(outside)


def test_hostile_dumps_are_refused_within_2_gb_of_address_space(tmp_path: Path) -> None:
    """The same tests again in a process that cannot have more: a map or a read of what a file claims would end it."""
    limited = (
        "import resource, sys, pytest\n"
        "import numpy, drafter_data.claiming.unlabelled, drafter_data.claiming.labelled\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), used + (1 << 30)))\n"
        "options = ['-q', '-x', '-p', 'no:cacheprovider', '--basetemp', sys.argv[2], '-k', 'refused_by_name or not_taken']\n"
        "sys.exit(pytest.main([sys.argv[1], *options]))"
    )
    found = subprocess.run(
        [sys.executable, "-c", limited, __file__, str(tmp_path / "t")],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-2000:]
