"""Checking one committed state file against its receipt, in one pass over its bytes.

Tensor legend: S tokens, L stored layers, H hidden size.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from data_contracts.identity import StoreIdentity, state_key_of_bytes
from data_contracts.receipt import Receipt
from data_contracts.validation import Finding
from drafter_data.errors import DumpRejected
from drafter_data.foreign_file import ForeignFile, RowsOnDisk
from drafter_data.safetensors_file import MAX_HEADER_BYTES, MalformedFile
from drafter_data.validation.reference import Reference
from drafter_data.validation.signature import Signature, signature_of
from drafter_data.verification import check_shape, hash_and_check

EXTRACT_AGAIN = "run `drafter-data fsck STORE --deep --repair`, then extract again"
READ_AGAIN = "mend the disk or raise `ulimit -n`, then validate again; what the disk has lost: remove the file, run fsck --repair"
UNREADABLE = "unreadable"
"""The disk, or the number of open files, and not the state: it may be read the next time."""
TENSORS = {"token_ids", "hidden_states"}


Measured = tuple[Signature, NDArray[np.int64]]
"""Signature and token ids [S] of a state."""


@dataclass(frozen=True)
class CheckedState:
    """What came of one file: a finding, or None, and of a good one what was measured."""

    receipt: Receipt
    finding: Finding | None
    measured: Measured | None = None

    @property
    def rms_l(self) -> NDArray[np.float64] | None:
        """Root mean square of each stored layer, of a state without a finding."""
        return self.measured[0].rms_l if self.measured is not None and self.finding is None else None


def check_size(path: Path, receipt: Receipt) -> Finding | None:
    """Whether the file of a receipt is there and has its size."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return _finding(receipt, path, "file-missing", f"{receipt.bytes} bytes, as its receipt says", "no file")
    except OSError as error:
        return _finding(receipt, path, UNREADABLE, f"a file of {receipt.bytes} bytes", str(error))
    return None if size == receipt.bytes else _finding(receipt, path, "file-size", f"{receipt.bytes} bytes", f"{size} bytes")


def check_state_file(
    path: Path, receipt: Receipt, identity: StoreIdentity, reference: Reference | None = None, room: memoryview | None = None
) -> CheckedState:
    """Checks existence, size, header, dtype, shape, token ids (by the name they hash to), checksum and content of one file.

    With a `reference`, also what no checksum shows: layers and rows that are not what they should be (reference.py). A file that
    goes into `room` is read at once.
    """
    checked = _checked(path, receipt, identity, reference, room)
    wrong_size = check_size(path, receipt) if checked.finding is not None else None  # then that is why: it was not read
    return checked if wrong_size is None else CheckedState(receipt, wrong_size)


def _checked(
    path: Path, receipt: Receipt, identity: StoreIdentity, reference: Reference | None, room: memoryview | None
) -> CheckedState:
    """As `check_state_file`, but that a missing file or one of another size is not told from others that cannot be read."""

    def finding(reason: str, expected: str, found: str) -> CheckedState:
        return CheckedState(receipt, _finding(receipt, path, reason, expected, found))

    try:
        with _opened(path, receipt, room) as file:
            if set(file.tensors) != TENSORS or file.tensors["token_ids"].start != 0 or file.tensors["token_ids"].dtype != "I64":
                return finding("header", "token_ids (I64), then hidden_states", ", ".join(sorted(file.tensors)))
            states_slh, ids_s = _states_of(file), file.array("token_ids")
            dtype = file.tensors["hidden_states"].dtype
            _check_content(states_slh, ids_s, dtype, receipt, identity)
            digest = xxhash.xxh3_128(file.head("hidden_states"))
            hash_and_check(states_slh, dtype, digest, f"sample {receipt.state_key[:12]}")
            if digest.hexdigest() != receipt.xxh3:
                return finding("checksum", f"xxh3 {receipt.xxh3}", f"xxh3 {digest.hexdigest()}")
            signature = signature_of(states_slh, dtype)
            verdict = reference.judge(signature, states_slh, dtype, ids_s) if reference is not None else None
    except MalformedFile as error:
        return finding("header", "a safetensors header of a state file", str(error))
    except DumpRejected as error:
        reason = "file-size" if error.reason == "dump-malformed" else error.reason  # cut while it was read
        return finding(reason, "states as the receipt and the store's identity say", str(error))
    except OSError as error:
        return finding(UNREADABLE, "a file that can be read", str(error))
    if verdict is not None:
        return finding(verdict.reason, verdict.expected, verdict.found)
    return CheckedState(receipt, None, (signature, ids_s))


def read_signature(path: Path, receipt: Receipt, identity: StoreIdentity, room: memoryview | None = None) -> Measured | None:
    """Signature and token ids of a state file, or None where it is not one of this store's (the check names that)."""
    try:
        with _opened(path, receipt, room) as file:
            states_slh, ids_s = _states_of(file), file.array("token_ids")
            expected = (len(ids_s), len(identity.layers), identity.hidden_size)
            if file.tensors["hidden_states"].dtype != identity.dtype or states_slh.shape != expected or not len(ids_s):
                return None
            with np.errstate(all="ignore"):  # a damaged state may be anything; it is left out, and named by its own check
                signature = signature_of(states_slh, identity.dtype)
            return (signature, ids_s) if np.isfinite(signature.shape_ll).all() else None
    except (MalformedFile, DumpRejected, OSError):
        return None


def _opened(path: Path, receipt: Receipt, room: memoryview | None) -> ForeignFile:
    """Read, not mapped: a disk's error is then an OSError and not a SIGBUS, and a map of what the kernel has cached in single pages
    takes longer than all checks (benchmarks/NOTES.md). A pipe in a state's place is not waited for.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    return ForeignFile(descriptor, str(path), MAX_HEADER_BYTES, exact_bytes=receipt.bytes, room=room)


def _states_of(file: ForeignFile) -> NDArray[Any] | RowsOnDisk:
    """The states: read some at a time, or in memory already."""
    states_slh, entry = file.rows("hidden_states"), file.tensors["hidden_states"]
    return states_slh if file.in_room(entry.start, states_slh.nbytes) is None else states_slh[:]


def _finding(receipt: Receipt, path: Path, reason: str, expected: str, found: str) -> Finding:
    remedy = READ_AGAIN if reason == UNREADABLE else EXTRACT_AGAIN
    return Finding(reason=reason, state_key=receipt.state_key, file=str(path), expected=expected, found=found, remedy=remedy)


def _check_content(
    states_slh: NDArray[Any] | RowsOnDisk, ids_s: NDArray[np.int64], dtype: str, receipt: Receipt, identity: StoreIdentity
) -> None:
    label = f"sample {receipt.state_key[:12]}"
    if states_slh.ndim != 3 or ids_s.ndim != 1:
        raise DumpRejected(f"{label}: expected [S, L, H] and [S], found {states_slh.shape} and {ids_s.shape}", reason="shape")
    check_shape(states_slh, dtype, receipt.tokens, (len(identity.layers), identity.hidden_size), identity.dtype, label)
    if len(ids_s) != receipt.tokens:
        raise DumpRejected(f"{label}: expected {receipt.tokens} token ids, found {len(ids_s)}", reason="row-count")
    if ids_s.min(initial=0) < 0 or ids_s.max(initial=0) > 0xFFFFFFFF:
        raise DumpRejected(f"{label}: a token id outside 0..2^32-1", reason="token-ids")
    found = state_key_of_bytes(ids_s.astype("<u4").tobytes())
    if found != receipt.state_key:
        raise DumpRejected(f"{label}: its token ids are those of {found[:12]}: another prompt's states", reason="token-ids")
