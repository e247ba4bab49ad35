"""Labelled dumps (data_contracts/dump.py): request id and token ids must agree with what was sent, whatever the length.

Tensor legend: S tokens, L stored layers, H hidden size.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from threading import Event
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_contracts.dump import ACKNOWLEDGEMENT, FILE_PREFIX, RID_PREFIX, TEMPORARY_PREFIX, name_of, rid_prefix_of
from data_contracts.identity import StoreIdentity
from drafter_data.claiming.folder import MAX_HEADER_BYTES, DumpFolder
from drafter_data.claiming.proof import LogprobProof
from drafter_data.engines.base import ClaimedDump, PrefillReply, PrefillRequest
from drafter_data.errors import DumpMissing, DumpRejected, SampleError
from drafter_data.foreign_file import ForeignFile, RowsOnDisk
from drafter_data.safetensors_file import MalformedFile, as_float32

SETTLE_SECONDS = 5.0
_FINAL = frozenset({"hostile-entry", "hostile-name", "proof-failed"})
"""Reasons that waiting cannot cure."""
_RANGE = re.compile(r"(\d{8})-(\d{8})\.safetensors$")


@dataclass
class _Piece:
    """An open piece of a prompt: rows start..end."""

    name: str
    file: ForeignFile
    start: int
    end: int


class LabelledClaims:
    """Claims dumps by their label. Run locks tell the files of a living pipeline from those that a killed one left."""

    def __init__(self, folder: DumpFolder, identity: StoreIdentity, run: str, proof: LogprobProof | None = None) -> None:
        self.stopped = Event()
        self._folder = folder
        self._proof = proof
        self._identity = identity
        folder.lock(_run_lock(run), f"run {run}, process {os.getpid()}")
        self._run = run

    def request_id(self, number: int) -> str:
        """A request id of this run."""
        return f"{RID_PREFIX}{self._run}-{number}"

    def claim(self, request: PrefillRequest, reply: PrefillReply, deadline: float) -> ClaimedDump:
        """Waits for the dump of a request. Raises DumpMissing, or DumpRejected with what differs.

        A file that is not as it should be may still be growing or be replaced: it is looked at again until the deadline, or until
        it has not changed for `SETTLE_SECONDS`.
        """
        _check_acknowledgement(reply, f"request {request.request_id}")
        pause, sizes, since = 0.0005, "", time.monotonic()
        wrong: DumpRejected | None = None
        while True:
            try:
                pieces = self._pieces(request)
                if pieces is not None:
                    return self._proven(self._claimed(request, pieces), reply)
            except DumpRejected as error:
                if error.reason in _FINAL:
                    raise
                wrong = error
            now = time.monotonic()
            if wrong is not None and sizes != (found := self._sizes(request)):
                sizes, since = found, now
            if now >= deadline or (wrong is not None and now - since > SETTLE_SECONDS):
                raise wrong or self._missing(request, reply)
            if self.stopped.wait(pause):
                raise DumpMissing(f"request {request.request_id}: no longer waited for", reason="interrupted")
            pause = min(pause * 2, 0.02)

    def _sizes(self, request: PrefillRequest) -> str:
        """Names and sizes of what a request has left so far."""
        prefix = rid_prefix_of(request.request_id)
        return " ".join(f"{name}:{self._folder.size_of(name)}" for name in sorted(self._folder.names()) if name.startswith(prefix))

    def _missing(self, request: PrefillRequest, reply: PrefillReply) -> SampleError:
        label = f"request {request.request_id} ({request.tokens} tokens)"
        ranges = self._ranges(request)
        if ranges and ranges[0][0] > 0:
            return DumpRejected(
                f"{label}: only the rows {', '.join(f'{start}..{end}' for start, end in ranges)} were dumped, the engine says that "
                f"{reply.cached_tokens} tokens came from its prefix cache: start it with --disable-radix-cache",
                reason="cached-prefix",
            )
        if ranges:
            found = ", ".join(f"{start}..{end}" for start, end in ranges)
            return DumpMissing(f"{label}: only the rows {found} were dumped in time", reason="row-count")
        if ACKNOWLEDGEMENT in reply.meta:
            return DumpMissing(
                f"{label}: acknowledged, but no complete dump under {self._folder.path} in time; is that the folder that the "
                "capture hook writes to?"
            )
        return DumpMissing(
            f"{label}: answered, but no dump was acknowledged and none came to {self._folder.path}: the capture hook was not "
            "called. A pattern in --forward-hooks that matches no module only warns in the server's log: start the server with the "
            "command that `drafter-data engine sglang --print` prints"
        )

    def _proven(self, dump: ClaimedDump, reply: PrefillReply) -> ClaimedDump:
        """The label names the request; the reply's log-probabilities show that the states are its too, where they can be read.

        States that are not finite, or zeros, are left to the commit, which names them.
        """
        if self._proof is None:
            return dump
        try:
            final_h = as_float32(dump.states_slh[-1, -1], dump.dtype)
        except BaseException:
            dump.close()
            raise
        if not np.isfinite(final_h).all() or not final_h.any():
            return dump
        error = self._proof.error(final_h, reply.top_logprobs)
        if error is not None and error > self._proof.tolerance:
            dump.close()
            raise DumpRejected(
                f"request {dump.request_id}: label and token ids are its own, but the final state does not give the reply's "
                f"log-probabilities (off by {error:.3g} nats, tolerance {self._proof.tolerance:.3g}): another prompt's states, "
                "another norm or another layer",
                reason="proof-failed",
            )
        return replace(dump, proof_error=error)

    def _pieces(self, request: PrefillRequest) -> list[_Piece] | None:
        """All pieces, opened, when they cover the prompt; None while some are missing."""
        try:
            return [self._open(name_of(request.request_id, 0, request.tokens), 0, request.tokens)]
        except FileNotFoundError:
            pass
        ranges = self._ranges(request)
        if not ranges or ranges[0][0] != 0 or ranges[-1][1] != request.tokens:
            return None
        if any(before[1] != after[0] for before, after in pairwise(ranges)):
            return None
        pieces: list[_Piece] = []
        try:
            for start, end in ranges:
                pieces.append(self._open(name_of(request.request_id, start, end), start, end))
        except BaseException:
            for piece in pieces:
                piece.file.close()
            raise
        return pieces

    def _ranges(self, request: PrefillRequest) -> list[tuple[int, int]]:
        prefix = rid_prefix_of(request.request_id)
        found = [_RANGE.search(name) for name in self._folder.names() if name.startswith(prefix)]
        return sorted((int(match[1]), int(match[2])) for match in found if match)

    def _open(self, name: str, start: int, end: int) -> _Piece:
        descriptor = self._folder.open_file(name, writable=True)
        try:
            most_bytes = (end - start) * (8 + len(self._identity.layers) * self._identity.hidden_size * 4)
            return _Piece(name, ForeignFile(descriptor, name, MAX_HEADER_BYTES, most_bytes), start, end)
        except MalformedFile as error:
            raise DumpRejected(f"dump {error}", reason="dump-malformed") from error

    def _claimed(self, request: PrefillRequest, pieces: list[_Piece]) -> ClaimedDump:
        def close() -> None:
            for piece in pieces:
                piece.file.close()

        try:
            for piece in pieces:
                self._check_label(request, piece)
            states = [piece.file.rows("hidden_states") for piece in pieces]
            ids = [piece.file.array("token_ids") for piece in pieces]
            for piece, states_slh, ids_s in zip(pieces, states, ids, strict=True):
                _check_rows(request, piece, states_slh, ids_s)
            joined_slh = states[0] if len(pieces) == 1 else np.concatenate([piece_slh[:] for piece_slh in states])
        except MalformedFile as error:
            close()
            raise DumpRejected(f"dump {error}", reason="dump-malformed") from error
        except BaseException:
            close()
            raise
        first, entries = pieces[0], [piece.name for piece in pieces]

        def leave() -> None:
            self._folder.remove(first.name)
            entries.clear()

        whole = len(pieces) == 1 and first.file.tensors["token_ids"].start == 0
        return ClaimedDump(
            request_id=request.request_id,
            states_slh=joined_slh,
            dtype=first.file.tensors["hidden_states"].dtype,  # pyright: ignore[reportArgumentType]  # commit compares it
            token_ids_s=ids[0] if len(pieces) == 1 else np.concatenate(ids),
            proof="label",
            proof_error=None,
            entries=entries,
            whole_file=(first.file.descriptor, first.name, first.file.header_bytes) if whole else None,
            close=close,
            leave=leave,
        )

    def _check_label(self, request: PrefillRequest, piece: _Piece) -> None:
        file, identity = piece.file, self._identity
        expected = {
            "rid": request.request_id,
            "start": str(piece.start),
            "end": str(piece.end),
            "layers": ",".join(map(str, identity.layers)),
            "final_norm": identity.final_norm,
        }
        for key, value in expected.items():
            if file.metadata.get(key) != value:
                raise DumpRejected(
                    f"dump {piece.name}: label {key}: expected {value!r}, found {file.metadata.get(key)!r}", reason="label-differs"
                )

    def abandon(self, request: PrefillRequest) -> None:
        """Removes what a failed request left."""
        prefix = rid_prefix_of(request.request_id)
        for name in self._folder.names():
            if name.startswith(prefix):
                self._folder.remove(name)

    def sweep(self) -> int:
        """Removes the dumps and locks of runs whose process is gone; returns how many dumps. Foreign and unreadable files stay."""
        names = self._folder.names()
        of_run = {name: run for name in names if (run := self._run_of(name) or _run_of_lock(name)) not in (None, self._run)}
        dead = {run for run in set(of_run.values()) if run and self._folder.remove_dead_lock(_run_lock(run))}
        left = [name for name, run in of_run.items() if run in dead and _run_of_lock(name) is None]
        for name in left:
            self._folder.remove(name)
        return len(left)

    def _run_of(self, name: str) -> str | None:
        """The run that a dump's own label names."""
        if not name.startswith((FILE_PREFIX, TEMPORARY_PREFIX + FILE_PREFIX)):
            return None
        try:
            descriptor = self._folder.open_file(name)
        except (DumpRejected, FileNotFoundError):
            return None
        try:
            with ForeignFile(descriptor, name, MAX_HEADER_BYTES) as file:
                return run_of(file.metadata.get("rid", ""))
        except (MalformedFile, OSError):
            return None

    def close(self) -> None:
        """Removes what came after its request was given up, and the run lock; the folder's close gives it back. What cannot be
        removed stays.
        """
        for name in [name for name in self._folder.names() if self._run_of(name) == self._run]:
            with suppress(DumpRejected):
                self._folder.remove(name)
        self._folder.remove(_run_lock(self._run))


def _check_rows(request: PrefillRequest, piece: _Piece, states_slh: RowsOnDisk, ids_s: NDArray[Any]) -> None:
    if ids_s.dtype != np.int64 or ids_s.ndim != 1:
        raise DumpRejected(f"dump {piece.name}: token_ids are {ids_s.dtype} {ids_s.shape}", reason="label-differs")
    if len(ids_s) != piece.end - piece.start:
        raise DumpRejected(f"dump {piece.name}: {len(ids_s)} rows, its name says {piece.start}..{piece.end}", reason="row-count")
    if not np.array_equal(ids_s, request.token_ids_s[piece.start : piece.end]):
        raise DumpRejected(f"dump {piece.name}: token ids differ from those sent", reason="token-ids")
    shape = states_slh.shape
    if len(shape) != 3 or shape[0] != len(ids_s):
        raise DumpRejected(f"dump {piece.name}: expected {len(ids_s)} rows, found shape {shape}", reason="row-count")


def run_of(request_id: str) -> str | None:
    """The run in a request id of ours, None in any other."""
    match = re.fullmatch(re.escape(RID_PREFIX) + r"([0-9a-f]{8})-\d+", request_id)
    return match[1] if match else None


def _run_lock(run: str) -> str:
    return f".dd-run-{run}.lock"


def _run_of_lock(name: str) -> str | None:
    match = re.fullmatch(r"\.dd-run-([0-9a-f]{8})\.lock", name)
    return match[1] if match else None


def _check_acknowledgement(reply: PrefillReply, label: str) -> None:
    """Raises DumpRejected when the hook says that it failed; a missing acknowledgement is decided by the file."""
    found = reply.meta.get(ACKNOWLEDGEMENT)
    acknowledgements: Sequence[object] = found if isinstance(found, list) else [found]
    for one in acknowledgements:
        error = one.get("error") if isinstance(one, dict) else None
        if error:
            raise DumpRejected(f"{label}: the capture hook failed: {str(error)[:300]}", reason="capture-failed")
