"""The store: `states/<first 2 hex>/<state_key>.safetensors`, receipts that name them, leases, plans.

    STORE/store.json            identity (data_contracts/identity.py); another one is refused
    STORE/states/ab/abcd….safetensors
    STORE/receipts/<chunk>.<writer>.jsonl
    STORE/leases/<chunk>.json
    STORE/locks/                held while a file comes into or leaves states/ (locks.py)
    STORE/plans/<dataset_id>/
    STORE/provenance.jsonl, canaries.jsonl   how states came about, what the canary found

Tensor legend: S tokens, L stored layers, H hidden size.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from data_contracts.identity import CONTRACT_VERSION, Provenance, StoreIdentity
from data_contracts.preflight import CanaryRecord
from data_contracts.receipt import Receipt
from data_contracts.record import Record
from drafter_data.engines.base import ClaimedDump
from drafter_data.errors import DumpRejected, IdentityMismatch, InputError, StateCorrupt
from drafter_data.files import TEMPORARY_PREFIX, append_line, write_new
from drafter_data.foreign_file import ForeignFile, RowsOnDisk
from drafter_data.safetensors_file import MAX_HEADER_BYTES, MalformedFile
from drafter_data.store.commit import written_state
from drafter_data.store.group_commit import GroupCommit
from drafter_data.store.leases import Lease, Leases
from drafter_data.store.locks import StateLocks
from drafter_data.store.receipts import ReceiptLine, ReceiptLog
from drafter_data.verification import check_shape, check_token_ids

RECORD_FILE = "store.json"
PROVENANCE_FILE = "provenance.jsonl"
CANARY_FILE = "canaries.jsonl"
HANDOFFS_FILE = "handoffs.txt"


class StoreRecord(Record):
    """store.json."""

    contract_version: int = CONTRACT_VERSION
    identity: StoreIdentity


@dataclass(frozen=True)
class StateView:
    """An open state file. `states_slh` is in storage form (bfloat16 as uint16) and read when it is looked at."""

    states_slh: RowsOnDisk
    token_ids_s: NDArray[np.int64]
    dtype: str
    file: ForeignFile

    def close(self) -> None:
        """Closes the file."""
        self.file.close()


def is_state_name(name: str) -> bool:
    """Whether a file name is `<state key>.safetensors`."""
    stem, dot, suffix = name.partition(".")
    return f"{dot}{suffix}" == ".safetensors" and len(stem) == 40 and set(stem) <= set("0123456789abcdef")


class Store:
    """All states of one identity. Several processes and hosts may have one store open."""

    def __init__(self, root: Path, identity: StoreIdentity) -> None:
        self.root = root
        self._states = root / "states"
        self.identity = identity
        writer = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._receipts = ReceiptLog(root / "receipts", writer)
        self._group: GroupCommit | None = None
        self._opening = threading.Lock()
        self._leases = Leases(root / "leases")
        self._locks = StateLocks(root / "locks")
        self._receipts.refresh()

    @classmethod
    def open(cls, root: Path, identity: StoreIdentity | None = None) -> Store:
        """Opens the store at `root`; with an identity, makes it where there is none.

        Raises InputError when there is no store and no identity, IdentityMismatch when the store holds states of another identity.
        """
        record_path = root / RECORD_FILE
        if not record_path.is_file():
            if identity is None:
                raise InputError(f"no store at {root}: expected {RECORD_FILE} in it, found none", reason="store-missing")
            if root.exists() and not root.is_dir():
                raise InputError(f"{root} is not a folder; name another store", reason="store-not-a-folder")
            try:
                for name in ("states", "receipts", "leases", "plans"):
                    (root / name).mkdir(parents=True, exist_ok=True)
                write_new(record_path, StoreRecord(identity=identity).model_dump_json(indent=2))
            except OSError as error:
                raise InputError(
                    f"cannot make a store at {root}: {error.strerror}; name a writable folder", reason="store-not-writable"
                ) from error
        try:
            found = StoreRecord.model_validate_json(record_path.read_bytes()).identity
        except ValidationError as error:
            raise InputError(
                f"{record_path} is not a store record: {error.errors()[0]['msg']}", reason="store-record-invalid"
            ) from error
        if identity is not None and found != identity:
            differences = "; ".join(found.differences(identity))
            raise IdentityMismatch(
                f"store {root} holds states of another identity (store != asked: {differences}); name another store"
            )
        return cls(root, found)

    def refresh(self) -> None:
        """Takes in what other processes have committed."""
        self._receipts.refresh()

    def find(self, state_key: str) -> Receipt | None:
        """The receipt of a state, or None when it is not in the store."""
        return self._receipts.find(state_key)

    def keys(self) -> Iterator[str]:
        """State keys with a receipt, in no order."""
        return self._receipts.keys()

    def __contains__(self, state_key: str) -> bool:
        return state_key in self._receipts

    def __len__(self) -> int:
        return len(self._receipts)

    def receipts(self) -> Iterator[Receipt]:
        """One receipt a state."""
        return self._receipts.all()

    def path_of(self, state_key: str) -> Path:
        """Where a state's file lies. Raises ValueError for anything but a key."""
        if len(bytes.fromhex(state_key)) != 20:
            raise ValueError(f"{state_key!r} is not a state key")
        return self._states / f"{state_key[:2]}/{state_key}.safetensors"

    def commit(
        self,
        dump: ClaimedDump,
        state_key: str,
        token_ids_s: NDArray[np.int64],
        *,
        chunk: str = "",
        attempts: int = 1,
        engine_seconds: float = 0.0,
    ) -> Receipt:
        """Verifies a claimed dump and stores it: temporary name, one pass of checks and checksum, fsync, rename, receipt.

        A state that already has a receipt is left alone and its receipt returned. Raises DumpRejected with the reason, or OSError
        (disk full, read-only) with nothing left behind but, where the last steps fail, a file without a receipt (fsck).
        """
        outcome = self.commit_soon(dump, state_key, token_ids_s, chunk=chunk, attempts=attempts, engine_seconds=engine_seconds)
        try:
            return outcome.result()
        finally:
            wait([outcome])  # also when interrupted: the caller's dump is in use until then

    def commit_soon(
        self,
        dump: ClaimedDump,
        state_key: str,
        token_ids_s: NDArray[np.int64],
        *,
        chunk: str = "",
        attempts: int = 1,
        engine_seconds: float = 0.0,
        release: Callable[[], object] = lambda: None,
    ) -> Future[Receipt]:
        """As `commit`, but returns once the state is verified and written: what is left is the disk's, and many share it. Errors of
        that part come with the result. `release` is called when the dump is needed no more, before there is a result or error.
        """
        with ExitStack() as held:
            held.callback(release)
            label = f"sample {state_key[:12]}"
            identity = self.identity
            check_shape(
                dump.states_slh, dump.dtype, len(token_ids_s), (len(identity.layers), identity.hidden_size), identity.dtype, label
            )
            check_token_ids(dump.token_ids_s, token_ids_s, label)
            final, group = self.path_of(state_key), self._committing()
            held.enter_context(group.room)
            held.enter_context(self._locks.hold(state_key))  # first: whoever has it may be another process, and stopped
            with group.writing(dump.states_slh.nbytes):
                if final.exists():  # a host that was taken for dead and went on may have brought it meanwhile
                    self._receipts.refresh()
                existing = self.find(state_key)
                if existing is not None:
                    return _known(existing)
                if not final.parent.is_dir():
                    final.parent.mkdir(exist_ok=True)
                state = held.enter_context(written_state(final, dump, token_ids_s, label, direct=group.local))
                receipt = Receipt(
                    state_key=state_key,
                    tokens=len(token_ids_s),
                    shape=(len(token_ids_s), len(identity.layers), identity.hidden_size),
                    dtype=identity.dtype,
                    bytes=state.bytes,
                    xxh3=state.xxh3,
                    attempts=attempts,
                    engine_seconds=engine_seconds,
                    proof=dump.proof,
                    proof_error=dump.proof_error,
                    chunk=chunk,
                    committed_at=time.time(),
                )
                return group.settle(state, receipt, held)

    def read(self, state_key: str) -> StateView:
        """Opens a committed state. Raises StateCorrupt when the file is missing or is no state file (fsck repairs)."""
        path = self.path_of(state_key)
        try:
            with ExitStack() as undo:
                file = ForeignFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC), str(path), MAX_HEADER_BYTES)
                undo.callback(file.close)
                view = StateView(file.rows("hidden_states"), file.array("token_ids"), file.tensors["hidden_states"].dtype, file)
                undo.pop_all()
                return view
        except (OSError, MalformedFile, DumpRejected) as error:
            raise StateCorrupt(f"{path}: {error}; run `drafter-data fsck {self.root} --repair` and extract again") from error

    def lease(self, chunk_key: str, holder: str) -> AbstractContextManager[None]:
        """Holds a chunk while it is worked on. Raises LeaseHeld when another live holder has it."""
        return self._leases.hold(chunk_key, holder)

    def leases(self) -> dict[str, tuple[Lease, bool]]:
        """Every lease by chunk key, and whether its holder lives as far as this host can tell."""
        return self._leases.all()

    def end_lease(self, chunk_key: str) -> bool:
        """Removes the lease of a holder that is gone; says whether it did."""
        return self._leases.remove_ended(chunk_key)

    def receipt_lines(self) -> Iterator[ReceiptLine]:
        """Every line of the receipts, readable or not (fsck)."""
        return self._receipts.lines()

    def set_aside(self, line: ReceiptLine) -> None:
        """Marks a line that is no receipt as seen (fsck)."""
        self._receipts.set_aside(line)

    def discard(self, reasons: Mapping[str, str], by: str = "fsck") -> None:
        """Takes states out of the store (key to reason), so that they are extracted again: first the receipts, then the files.

        A file that some living commit has just put there, with a receipt, stays. Killed in between, it leaves files without a
        receipt, which fsck and gc remove. `by` names the receipts file that takes back.
        """
        if not reasons:
            return
        self._receipts.drop(reasons, by)
        for key in reasons:
            self.remove_orphan(self.path_of(key))

    def remove_orphan(self, path: Path) -> bool:
        """Removes a file below `states/` that no receipt names; says whether it did. A commit in progress is waited for."""
        with self._locks.hold(path.parent.name):
            self._receipts.refresh()
            if is_state_name(path.name) and path.stem in self._receipts:
                return False
            path.unlink(missing_ok=True)
            return True

    def record_provenance(self, provenance: Provenance) -> list[str]:
        """Appends how states come about from now on; returns one line for each thing that differs from the last time."""
        path = self.root / PROVENANCE_FILE
        lines = path.read_text().splitlines() if path.is_file() else []
        last = Provenance.model_validate_json(lines[-1]) if lines else None
        if last == provenance:
            return []
        append_line(path, provenance.model_dump_json().encode())
        if last is None:
            return []
        before, now = last.model_dump(), provenance.model_dump()
        return [f"{name}: {before[name]} -> {now[name]}" for name in now if before[name] != now[name]]

    def provenances(self) -> tuple[Provenance, ...]:
        """All recorded provenances, oldest first."""
        path = self.root / PROVENANCE_FILE
        return tuple(Provenance.model_validate_json(line) for line in path.read_text().splitlines()) if path.is_file() else ()

    def record_canary(self, record: CanaryRecord) -> None:
        """Appends what the canary found before a run."""
        append_line(self.root / CANARY_FILE, record.model_dump_json().encode())

    def canaries(self) -> tuple[CanaryRecord, ...]:
        """The last canary of each engine, by fingerprint; engines in the order of their first."""
        path = self.root / CANARY_FILE
        lines = path.read_text().splitlines() if path.is_file() else []
        return tuple({record.fingerprint: record for record in map(CanaryRecord.model_validate_json, lines)}.values())

    def record_handoff(self, folder: Path) -> None:
        """Writes down where a hand-off of this store's states lies, so that `gc` finds it wherever that is."""
        path, line = self.root / HANDOFFS_FILE, str(folder.absolute())
        if line in self.handoffs():
            return
        append_line(path, os.fsencode(line))

    def handoffs(self) -> tuple[str, ...]:
        """Folders of all hand-offs ever made; many may be gone."""
        path = self.root / HANDOFFS_FILE
        return tuple(path.read_text().splitlines()) if path.is_file() else ()

    def sweep(self) -> int:
        """Removes temporary files that killed processes of this store left; returns how many. Only under no lease of others."""
        removed = 0
        for path in self.root.glob(f"states/*/{TEMPORARY_PREFIX}*"):
            with self._locks.hold(path.parent.name):
                path.unlink(missing_ok=True)
                removed += 1
        return removed

    def close(self) -> None:
        """Settles what is written, closes files and stops renewing leases."""
        if self._group is not None:
            self._group.close()
        self._receipts.close()
        self._leases.close()

    def _committing(self) -> GroupCommit:
        with self._opening:
            if self._group is None:
                self._group = GroupCommit(self.root / "states", self._receipts)
            return self._group


def _known(receipt: Receipt) -> Future[Receipt]:
    known = Future[Receipt]()
    known.set_result(receipt)
    return known
