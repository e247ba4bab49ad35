"""Unlabelled dumps: `req_<counter>/`, one a forward PASS, known only by the pass's token count.

A sample's dump is the one complete dump, not there before the request was sent, whose token count equals the prompt's, proven by
the reply's log-probabilities where lm_head can be read. The counter says nothing: warm-up, health checks and other clients move it.
Tensor legend: S tokens, L stored layers, H hidden size.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field, replace

import xxhash

from data_contracts.identity import StoreIdentity
from drafter_data.claiming.folder import LOCK_NAME, DumpFolder
from drafter_data.claiming.pass_dump import complete_tokens, read_pass
from drafter_data.claiming.proof import LogprobProof
from drafter_data.engines.base import ClaimedDump, PrefillReply, PrefillRequest
from drafter_data.errors import DumpAmbiguous, DumpMissing, DumpRejected, PassMixed
from drafter_data.safetensors_file import MalformedFile, as_float32
from drafter_data.verification import hash_and_check

FOLDER_PREFIX = "req_"
STRAY_SECONDS = 60.0
MIXED_PASS_SECONDS = 1.0
"""How long after the reply a dump of the right count may still come when a larger one is there: the patch writes
before it answers.
"""
SETTLE_SECONDS = 5.0
"""How long after the reply its dump may still come when one of the right count was refused."""
RESCAN_SECONDS = 0.002


@dataclass
class _Seen:
    """A dump folder that a scan has seen. `number` orders the scans; `tokens` is None until it is complete."""

    number: int
    at: float
    tokens: int | None = None
    defect: str = ""
    due: float = 0.0
    refused: dict[str, DumpRejected] = field(default_factory=dict[str, DumpRejected])


class UnlabelledClaims:
    """Claims dumps by token count and proof. One owner of the folder; thread-safe."""

    def __init__(
        self, folder: DumpFolder, identity: StoreIdentity, proof: LogprobProof | None, *, exclusive: bool, run: str
    ) -> None:
        folder.lock(LOCK_NAME, f"run {run}, process {os.getpid()}")
        self.stopped = threading.Event()
        self._folder = folder
        self._identity = identity
        self._proof = proof
        self._exclusive = exclusive
        self._run = run
        self._lock = threading.Lock()
        self._seen: dict[str, _Seen] = {}
        self._scans = 0
        self._scanned_at = 0.0
        self._open: dict[str, tuple[int, int]] = {}
        self.swept = 0
        self._scan()
        self._before_lease = frozenset(self._seen)

    def request_id(self, number: int) -> str:
        """A request id of this run (the engine logs it; dumps do not carry it)."""
        return f"dd-{self._run}-{number}"

    def before_send(self, request: PrefillRequest) -> None:
        """Notes what is there before the request is sent: none of that can be its dump."""
        with self._lock:
            self._scan()
            self._open[request.request_id] = (self._scans, request.tokens)

    def claim(self, request: PrefillRequest, reply: PrefillReply, deadline: float) -> ClaimedDump:
        """Waits for the dump of a request. Raises DumpMissing, DumpAmbiguous or DumpRejected."""
        if self._proof is None and request.tokens == 1:
            raise DumpRejected(
                f"request {request.request_id}: a 1-token dump may be a health check's and lm_head cannot be read for a proof; "
                "give the model folder, or use labelled dumps",
                reason="one-token-unproven",
            )
        pause, start = 0.0005, time.monotonic()
        while True:
            with self._lock:
                if time.monotonic() - self._scanned_at > RESCAN_SECONDS:  # all claims in flight share the scans
                    self._scan()
                candidates, larger = self._candidates(request), self._larger(request)
            dump = self._settle(request, reply, candidates)
            if dump is not None:
                return dump
            with self._lock:
                refused = self._refused(request)
            if refused and time.monotonic() - start > SETTLE_SECONDS:
                raise refused
            if larger and time.monotonic() - start > MIXED_PASS_SECONDS:
                raise PassMixed(
                    f"request {request.request_id}: no dump of {request.tokens} tokens, but {larger} has more: its pass "
                    "mixed other requests in; start the engine with --prefill-max-requests 1"
                )
            if time.monotonic() >= deadline:
                raise refused or self._missing(request, reply)
            if self.stopped.wait(pause):
                raise DumpMissing(f"request {request.request_id}: no longer waited for", reason="interrupted")
            pause = min(pause * 2, 0.02)

    def _refused(self, request: PrefillRequest) -> DumpRejected | None:
        """Why a dump of the right count was not this request's (under the lock)."""
        return next((seen.refused[request.request_id] for seen in self._seen.values() if request.request_id in seen.refused), None)

    def _missing(self, request: PrefillRequest, reply: PrefillReply) -> DumpMissing:
        """Says what came instead. Dumps carry no label, so with more requests in flight this is a guess."""
        label = f"request {request.request_id} ({request.tokens} tokens)"
        with self._lock:
            sent = self._open[request.request_id][0]
            wanted = {tokens for _, tokens in self._open.values()}
            born = [seen for seen in self._seen.values() if seen.number > sent]
        counts = sorted({seen.tokens for seen in born if seen.tokens is not None and seen.tokens > 1 and seen.tokens not in wanted})
        if reply.cached_tokens:
            return DumpMissing(
                f"{label}: no dump of all its tokens; the engine says that {reply.cached_tokens} came from its prefix cache: start "
                "it with --disable-radix-cache",
                reason="cached-prefix",
            )
        if defect := next((seen.defect for seen in born if seen.defect), ""):
            return DumpMissing(f"{label}: the dump that came is not whole: {defect}", reason="dump-malformed")
        if counts:
            return DumpMissing(f"{label}: only dumps of {', '.join(map(str, counts))} tokens came in time", reason="row-count")
        return DumpMissing(
            f"{label}: answered, but no complete dump of its size appeared under {self._folder.path} in time; is that the folder "
            f"the engine dumps to?{self._others(wanted)}"
        )

    def _others(self, wanted: set[int]) -> str:
        """What lies in a shared folder and is nobody's here: it may be what fills it, and is not ours to remove."""
        with self._lock:
            names = sorted(name for name, seen in self._seen.items() if seen.tokens not in wanted)
        if self._exclusive or not names:
            return ""
        shown = ", ".join([*names[:3], *(["..."] if names[3:] else [])])
        return f" {len(names)} dumps of others lie there ({shown}); the folder is shared, so they are left alone"

    def _scan(self) -> None:
        """Takes in new folders and completes known ones (under the lock)."""
        self._scans += 1
        names = {name for name in self._folder.names() if name.startswith(FOLDER_PREFIX)}
        for gone in self._seen.keys() - names:
            del self._seen[gone]
        for name in names - self._seen.keys():
            self._seen[name] = _Seen(self._scans, time.monotonic())
        wanted, fresh = {tokens for _, tokens in self._open.values()}, time.monotonic() - SETTLE_SECONDS
        for name, seen in self._seen.items():
            # A young dump of a count that nobody waits for may be an early version of one.
            open_question = seen.tokens is None or (seen.tokens > 1 and seen.tokens not in wanted and seen.at > fresh)
            if open_question and seen.due <= time.monotonic():
                seen.tokens, seen.defect = complete_tokens(self._folder, name, self._identity)
                # What stays unfinished is looked at ever less often.
                seen.due = time.monotonic() + (time.monotonic() - seen.at) / 8
        self._scanned_at = time.monotonic()
        if self._exclusive:
            self._sweep_strays()

    def _candidates(self, request: PrefillRequest) -> list[str]:
        sent = self._open[request.request_id][0]
        return [
            name
            for name, seen in self._seen.items()
            if seen.number > sent and seen.tokens == request.tokens and request.request_id not in seen.refused
        ]

    def _larger(self, request: PrefillRequest) -> str | None:
        """A complete dump born after the request was sent that has more tokens than the prompt and than any other open request."""
        sent = self._open[request.request_id][0]
        longest = max(tokens for _, tokens in self._open.values())
        return next((name for name, seen in self._seen.items() if seen.number > sent and (seen.tokens or 0) > longest), None)

    def _settle(self, request: PrefillRequest, reply: PrefillReply, candidates: list[str]) -> ClaimedDump | None:
        """The claimed dump; None when none of the candidates is (yet) it."""
        if self._proof is None and len(candidates) > 1:
            raise DumpAmbiguous(
                f"request {request.request_id}: {len(candidates)} dumps of {request.tokens} tokens "
                f"({', '.join(sorted(candidates)[:4])}) and no lm_head to tell them apart; asked again alone"
            )
        for name in candidates:
            try:
                dump = self._read(request, name)
            except (FileNotFoundError, MalformedFile, DumpRejected):
                continue  # written again, cut, or removed, since it was whole; the next scan takes it anew
            if self._proof is None:
                return dump
            error = self._proof.error(as_float32(dump.states_slh[-1, -1], dump.dtype), reply.top_logprobs)
            if error is None:
                raise DumpRejected(
                    f"request {request.request_id}: the reply has no usable top log-probabilities for the proof", reason="no-proof"
                )
            if error <= self._proof.tolerance:
                return replace(dump, proof="token-count+logprobs", proof_error=error)
            with self._lock:
                if name in self._seen:
                    self._seen[name].refused[request.request_id] = self._refusal(request, name, dump, error)
        return None

    def _refusal(self, request: PrefillRequest, name: str, dump: ClaimedDump, error: float) -> DumpRejected:
        assert self._proof is not None
        try:
            hash_and_check(dump.states_slh, dump.dtype, xxhash.xxh3_128(), f"request {request.request_id}, dump {name}")
        except DumpRejected as found:
            return found
        return DumpRejected(
            f"request {request.request_id}: dump {name} has its {request.tokens} tokens, but its final state does not give the "
            f"reply's log-probabilities (off by {error:.3g} nats, tolerance {self._proof.tolerance:.3g}): another request's dump, "
            "another norm or another layer",
            reason="proof-failed",
        )

    def _read(self, request: PrefillRequest, name: str) -> ClaimedDump:
        states_slh, dtype = read_pass(self._folder, name, self._identity, request.tokens)
        return ClaimedDump(
            request_id=request.request_id,
            states_slh=states_slh,
            dtype=dtype,  # pyright: ignore[reportArgumentType]  # commit compares it with the store's
            token_ids_s=None,
            proof="token-count",
            proof_error=None,
            entries=(name,),
        )

    def settled(self, request_id: str) -> None:
        """The request is over: dumps that only it could have claimed may be swept."""
        with self._lock:
            self._open.pop(request_id, None)

    def _sweep_strays(self) -> None:
        """Removes dumps born after the lease that match nothing in flight and are older than a minute (under the lock)."""
        wanted = {tokens for _, tokens in self._open.values()}
        old = time.monotonic() - STRAY_SECONDS
        strays = [
            name
            for name, seen in self._seen.items()
            if seen.at < old and name not in self._before_lease and seen.tokens not in wanted
        ]
        for name in strays:
            try:
                self._folder.remove(name)
            except (OSError, DumpRejected):  # what no engine of ours wrote, a folder of folders say: left alone from now on
                self._seen[name].at = float("inf")
                continue
            del self._seen[name]
            self.swept += 1
