"""A script of faults for the embedded engine: everything that public reports say goes wrong with real ones, on demand and seeded.

    {"seed": 0, "faults": [{"name": "nan", "rate": 0.02}, {"name": "silent", "rate": 1, "from_seconds": 10, "to_seconds": 20}]}

The file is read again whenever it changes, so a running engine can be given other faults; times count from that reading. Only
requests whose id begins with `RID_PREFIX` are hit. Dumps are spoilt in `fault_writer.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from data_contracts.dump import RID_PREFIX
from data_contracts.record import Record
from drafter_data.embedded.request import BadRequest, GenerateRequest
from drafter_data.errors import UsageError

ContentFault = Literal[
    "rows-missing", "prefix-hit", "swapped", "nan", "inf", "zeros", "zero-row", "duplicate-layer", "shifted-layer", "transposed",
    "wrong-norm",
]  # fmt: skip
FileFault = Literal["late", "dropped", "growing", "unfinished", "versions", "stale-lock", "cut", "trailing"]
ServiceFault = Literal["silent", "server-error", "exit", "cut-prompt", "foreign", "health-503"]
CONTENT_FAULTS: tuple[ContentFault, ...] = ContentFault.__args__  # pyright: ignore[reportAttributeAccessIssue]
FILE_FAULTS: tuple[FileFault, ...] = FileFault.__args__  # pyright: ignore[reportAttributeAccessIssue]
EXIT_STATUS = 9


class Fault(Record):
    """One switch.

    `rate`: share of requests hit. `per_prompt`: the prompt decides alone, so that it is hit always or never; else each request is
    drawn anew. `attempts`: a prompt is hit at most so often (0: no bound). `after`: requests that pass first. `in_flight`: only
    while so many requests are under way. `seconds`: how late, how slowly, how long apart (the fault's own measure).
    """

    name: ContentFault | FileFault | ServiceFault
    rate: float = 1.0
    per_prompt: bool = False
    attempts: int = 0
    after: int = 0
    in_flight: int = 0
    from_seconds: float = 0.0
    to_seconds: float = 1e9
    seconds: float = 0.1


class FaultScript(Record):
    """What the file holds."""

    seed: int = 0
    faults: tuple[Fault, ...] = ()


def parse_switches(switches: Sequence[str]) -> FaultScript:
    """A script from `NAME[:rate]` switches. Raises UsageError."""
    faults: list[dict[str, Any]] = []
    for switch in switches:
        name, _, rate = switch.partition(":")
        try:
            faults.append({"name": name, "rate": float(rate or 1)})
        except ValueError:
            raise UsageError(f"fault {switch!r}: expected NAME or NAME:rate, for example nan:0.02") from None
    return _script({"faults": faults}, "--fault")


def _script(found: object, where: str) -> FaultScript:
    try:
        return FaultScript.model_validate_json(json.dumps(found))
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def prompt_key(token_ids_s: NDArray[np.int64]) -> bytes:
    """What names a prompt in the draw."""
    return hashlib.blake2b(token_ids_s.tobytes(), digest_size=16).digest()


def drawn(seed: int, number: int, seen: int, key: bytes) -> float:
    """The draw, 0 to 1, of the script's fault `number` for a prompt: the same for each request (`seen` 0) or for its n-th."""
    digest = hashlib.blake2b(f"{seed} {number} {seen} ".encode() + key, digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


class Faults:
    """Decides which request is hit by what. Thread-safe."""

    def __init__(self, switches: Sequence[str] = (), file: Path | None = None) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._in_flight: set[str] = set()
        self._mtime_ns = 0
        self._take(parse_switches(switches))
        if file is not None:
            self._reread()

    def _take(self, script: FaultScript) -> None:
        self._script = script
        self._since = time.monotonic()
        self._requests = 0
        self._seen: Counter[bytes] = Counter()
        self._hits: Counter[tuple[int, bytes]] = Counter()
        self._active: dict[str, tuple[Fault, ...]] = {}

    def _reread(self) -> None:
        """Takes the script again when the file has changed (under the lock, or before threads)."""
        assert self._file is not None
        try:
            mtime_ns = self._file.stat().st_mtime_ns
            if mtime_ns != self._mtime_ns:
                self._take(_script(json.loads(self._file.read_bytes()), str(self._file)))
                self._mtime_ns = mtime_ns
        except (OSError, ValueError) as error:
            raise UsageError(f"{self._file}: no fault script: {error}") from None

    def arrived(self, request: GenerateRequest) -> None:
        """Draws what the request is hit by; `of` tells afterwards."""
        if not request.rid.startswith(RID_PREFIX):
            return
        with self._lock:
            if self._file is not None:
                self._reread()
            key = prompt_key(request.token_ids_s)
            self._requests += 1
            self._seen[key] += 1
            self._in_flight.add(request.rid)
            self._active[request.rid] = tuple(
                fault for number, fault in enumerate(self._script.faults) if self._hit(number, fault, key)
            )

    def _hit(self, number: int, fault: Fault, key: bytes) -> bool:
        elapsed = time.monotonic() - self._since
        if not fault.from_seconds <= elapsed < fault.to_seconds or self._requests <= fault.after:
            return False
        if len(self._in_flight) < fault.in_flight or (fault.attempts and self._hits[number, key] >= fault.attempts):
            return False
        if drawn(self._script.seed, number, 0 if fault.per_prompt else self._seen[key], key) >= fault.rate:
            return False
        self._hits[number, key] += 1
        return True

    def left(self, request: GenerateRequest) -> None:
        """The request was answered; its dump may still be under way."""
        with self._lock:
            self._in_flight.discard(request.rid)

    def of(self, rid: str) -> tuple[Fault, ...]:
        """What a request is hit by."""
        return self._active.get(rid, ())

    def named(self, rid: str, name: str) -> Fault | None:
        """The fault of that name, when the request is hit by it."""
        return next((fault for fault in self.of(rid) if fault.name == name), None)

    def now(self, name: str) -> bool:
        """Whether a fault that is not of a request (`health-503`) is on."""
        with self._lock:
            if self._file is not None:
                self._reread()
            elapsed = time.monotonic() - self._since
            return any(fault.name == name and fault.from_seconds <= elapsed < fault.to_seconds for fault in self._script.faults)

    def before(self, request: GenerateRequest, connection: socket.socket) -> GenerateRequest:
        """What happens to a request before it is queued. Raises BadRequest for an answer of 5xx."""
        self.arrived(request)
        if self.named(request.rid, "exit"):
            os._exit(EXIT_STATUS)
        if self.named(request.rid, "silent"):
            connection.settimeout(3600)
            connection.recv(1, socket.MSG_PEEK)  # until the client gives up
            raise ConnectionResetError("the client has given up")
        if fault := self.named(request.rid, "server-error"):
            time.sleep(min(fault.seconds, 0.05))
            raise BadRequest("fault: server-error", HTTPStatus.SERVICE_UNAVAILABLE)
        if self.named(request.rid, "cut-prompt") and request.tokens > 1:
            request.token_ids_s = request.token_ids_s[: max(1, request.tokens * 3 // 4)]
        return request

    def reply(self, request: GenerateRequest) -> dict[str, Any]:
        """The reply as the client gets it."""
        self.left(request)
        payload = request.reply()
        if self.named(request.rid, "prefix-hit"):
            payload["meta_info"]["cached_tokens"] = request.tokens // 2
        return payload

    def foreign(self, request: GenerateRequest) -> GenerateRequest | None:
        """Another client's request of the same length, to be queued before this one."""
        if not self.named(request.rid, "foreign"):
            return None
        ids_s = np.roll(request.token_ids_s[::-1], 1)
        return GenerateRequest(
            f"foreign-{request.rid}", np.ascontiguousarray(ids_s), max_new_tokens=1, temperature=0, ignore_eos=True
        )
