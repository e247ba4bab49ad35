"""SGLang (and the embedded engine, which speaks its API) behind the Engine seam, with labelled or unlabelled dumps."""

from __future__ import annotations

import secrets
import time
from itertools import count

from drafter_data.claiming.folder import DumpFolder
from drafter_data.claiming.labelled import LabelledClaims
from drafter_data.claiming.proof import LogprobProof
from drafter_data.claiming.unlabelled import UnlabelledClaims
from drafter_data.engines.base import ClaimedDump, EngineInfo, PrefillReply, PrefillRequest
from drafter_data.engines.sglang_http import SGLangClient


class SGLangEngine:
    """An SGLang server and the folder that it dumps to."""

    def __init__(
        self, client: SGLangClient, info: EngineInfo, folder: DumpFolder, proof: LogprobProof | None, *, exclusive: bool
    ) -> None:
        self._client = client
        self._info = info
        self._folder = folder
        self._last_dump_at = time.monotonic()
        run = secrets.token_hex(4)
        if info.labelled:
            self._claims: LabelledClaims | UnlabelledClaims = LabelledClaims(folder, info.identity, run, proof)
        else:
            self._claims = UnlabelledClaims(folder, info.identity, proof, exclusive=exclusive, run=run)
        self._numbers = count()

    def describe(self) -> EngineInfo:
        """What the engine is and allows."""
        return self._info

    def new_request_id(self) -> str:
        """A request id that was never used before."""
        return self._claims.request_id(next(self._numbers))

    def send(self, request: PrefillRequest) -> PrefillReply:
        """Prefills one prompt; blocks until the reply."""
        if isinstance(self._claims, UnlabelledClaims):
            self._claims.before_send(request)
        return self._client.generate(request)

    def claim(self, request: PrefillRequest, reply: PrefillReply, deadline: float) -> ClaimedDump:
        """Waits for the request's dump until `deadline` (`time.monotonic()` seconds)."""
        try:
            dump = self._claims.claim(request, reply, deadline)
        finally:
            if isinstance(self._claims, UnlabelledClaims):
                self._claims.settled(request.request_id)
        self._last_dump_at = time.monotonic()
        return dump

    def release(self, dump: ClaimedDump) -> None:
        """Removes a claimed dump from the dump folder."""
        dump.close()
        for name in dump.entries:
            self._folder.remove(name)

    def abandon(self, request: PrefillRequest) -> None:
        """Removes what a failed request left and is provably its own (an unlabelled dump never is)."""
        if isinstance(self._claims, LabelledClaims):
            self._claims.abandon(request)
        else:
            self._claims.settled(request.request_id)

    def sweep(self) -> int:
        """Removes left-overs of our own dead runs; returns how many."""
        return self._claims.sweep() if isinstance(self._claims, LabelledClaims) else 0

    def free_bytes(self) -> int:
        """Bytes that can still be written to the dump folder."""
        return self._folder.free_bytes()

    def alive(self) -> bool:
        """Whether a forward pass of the engine's own succeeds, or a dump came while that was waited for: a busy engine is alive."""
        start = time.monotonic()
        return (self._client.ready() and self._client.works()) or self._last_dump_at > start

    def interrupt(self) -> None:
        """Ends all waiting for replies and dumps, for good."""
        self._client.interrupt()
        self._claims.stopped.set()

    def close(self) -> None:
        """Gives back the dump folder."""
        if isinstance(self._claims, LabelledClaims):
            self._claims.close()
        self._folder.close()
