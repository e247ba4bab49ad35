"""The Engine seam: what the extraction loop knows of an inference server.

Tensor names carry their shape: S tokens of a prompt, L stored layers (aux layers ascending, then the final state), H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from data_contracts.identity import Provenance, StateDtype, StoreIdentity
from data_contracts.receipt import ClaimProof
from drafter_data.foreign_file import RowsOnDisk

StateArray = NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16] | RowsOnDisk
"""States in storage form; bfloat16 is held as its uint16 bit patterns, since NumPy has no such dtype. What lies in the dump folder
is read when it is looked at (foreign_file.py)."""


@dataclass(frozen=True)
class EngineInfo:
    """What an engine is and allows, read from the engine itself.

    `max_prompt_tokens` is the longest prompt it takes whole. `in_flight_limit` is how many requests may be open at once without
    endangering the claim (1 = strictly one after another). `lengths_must_differ`: no two of one length may be in flight.
    """

    kind: str
    url: str
    identity: StoreIdentity
    provenance: Provenance
    max_prompt_tokens: int
    in_flight_limit: int
    lengths_must_differ: bool
    labelled: bool
    fingerprint: str
    server_info: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class PrefillRequest:
    """One prompt to prefill. `token_ids_s` is int64 [S]; `request_id` matches `[A-Za-z0-9_-]+` and is new for each attempt."""

    request_id: str
    state_key: str
    token_ids_s: NDArray[np.int64]

    @property
    def tokens(self) -> int:
        """Prompt length."""
        return len(self.token_ids_s)


@dataclass(frozen=True)
class PrefillReply:
    """What the engine answered. Times are `time.time()` seconds.

    `top_logprobs` are (token id, log-probability) pairs of the last position.
    """

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    sent_at: float
    seconds: float
    top_logprobs: tuple[tuple[int, float], ...] = ()
    meta: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class ClaimedDump:
    """A dump whose owner is proven, still in the dump folder (not copied).

    `token_ids_s` are the ids that the dump itself carries (None where it carries none). `whole_file` is set when the dump is one
    file in the state form that a store on the same file system may take as it is: (writable file descriptor, name, header bytes).
    `entries` are the names in the dump folder that `release` removes. `leave` takes a whole file's name out of the dump folder,
    and out of `entries`, once the store has given it one of its own and before its label is overwritten: a file of which nobody
    can tell whose it is must not stay behind a kill.
    """

    request_id: str
    states_slh: StateArray
    dtype: StateDtype
    token_ids_s: NDArray[np.int64] | None
    proof: ClaimProof
    proof_error: float | None
    entries: Sequence[str]
    whole_file: tuple[int, str, int] | None = None
    close: Callable[[], None] = lambda: None
    leave: Callable[[], None] = lambda: None

    @property
    def bytes(self) -> int:
        """Bytes of the states."""
        return self.states_slh.nbytes


class Engine(Protocol):
    """An inference server that dumps hidden states.

    `send` blocks until the reply; it raises RequestRefused (4xx) or EngineLost (transport errors after its own retries). It is
    called from many threads. `claim` blocks until the dump is complete or `deadline` (`time.monotonic()` seconds) and raises
    DumpMissing, DumpAmbiguous or DumpRejected. `release` removes a claimed dump, or what a failed request left (by request).
    """

    def describe(self) -> EngineInfo: ...

    def new_request_id(self) -> str:
        """A request id that was never used before."""
        ...

    def send(self, request: PrefillRequest) -> PrefillReply: ...

    def claim(self, request: PrefillRequest, reply: PrefillReply, deadline: float) -> ClaimedDump: ...

    def release(self, dump: ClaimedDump) -> None: ...

    def abandon(self, request: PrefillRequest) -> None:
        """Removes whatever a failed request left in the dump folder that is provably its own."""
        ...

    def sweep(self) -> int:
        """Removes left-overs of our own dead runs from the dump folder; returns how many."""
        ...

    def free_bytes(self) -> int:
        """Bytes that can still be written to the dump folder."""
        ...

    def alive(self) -> bool:
        """Whether the engine answers or has dumped lately: a busy engine is alive."""
        ...

    def interrupt(self) -> None:
        """Ends all waiting for replies and dumps, for good: the session is being closed."""
        ...

    def close(self) -> None:
        """Gives back the dump folder and connections."""
        ...
