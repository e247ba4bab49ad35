"""A receipt: the proof that a state file was committed. One fsynced JSON line in `receipts/<chunk_key>.<writer>.jsonl`."""

from __future__ import annotations

from typing import Literal

from data_contracts.identity import StateDtype
from data_contracts.record import Record

ClaimProof = Literal["label", "token-count+logprobs", "token-count", "adopted"]


class Receipt(Record):
    """Names a state file by content. `shape` is [tokens, layers, hidden]; `xxh3` is xxh3-128 hex of the whole file."""

    state_key: str
    tokens: int
    shape: tuple[int, int, int]
    dtype: StateDtype
    bytes: int
    xxh3: str
    attempts: int = 1
    engine_seconds: float = 0.0
    proof: ClaimProof
    proof_error: float | None = None
    chunk: str = ""
    committed_at: float = 0.0


class DroppedReceipt(Record):
    """A later line that takes back the receipt at byte `offset` of the receipts file `file` (fsck writes it).

    It names a position, not a key or a time: the order of lines in different files, and clocks of different hosts, do not matter.
    """

    dropped: str
    file: str
    offset: int
    reason: str
    dropped_at: float
