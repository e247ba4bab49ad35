"""Stage 6 on other hosts: chunks as runs of the deployment `extract-chunk`, in one shared queue; each host has its own engine.

Prefect learns late, or never, that a host has died with its worker. So each chunk's run holds a lease in the store under its own
id (store/activity.py), and when that ends the chunk is sent again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.deployments import run_deployment
from prefect.states import Crashed

from data_contracts.parameters import ChunkEngineParameters, ChunkParameters
from data_contracts.plan import Chunk
from drafter_data.extraction.session import SessionSettings
from drafter_data.store.activity import activity_of, forget_activity
from tasks.publishing import say
from tasks.sent_runs import OPEN_STATES, cancel_sent

DEPLOYMENT = "extract-chunk/extract-chunk"
POLL_SECONDS = 2.0
START_SECONDS = 300.0
"""So long a run that a worker has taken may be without a lease: its process starts, or has just given the lease back."""
MOST_SENDS = 4
"""Times that one chunk is sent: a prompt that ends engines must not end all of them."""
HOST_REASONS = frozenset(
    {
        "engine-lost", "engine-hung", "engine-silent", "engine-broke", "engine-unreachable", "engine-exited", "engine-not-ready",
        "engine-not-there", "port-taken", "no-capture-hook", "capture-failed", "failures-in-a-row", "host-file",
        "dump-folder-missing", "dump-folder-not-ours", "dump-folder-not-writable", "dump-folder-full", "dump-folder-held",
    }
)  # fmt: skip
"""What one host can fail with while another may do."""
PAGE = 200


def send_chunks(settings: SessionSettings, chunks: list[Chunk]) -> dict[int, str]:
    """Sends a run for each chunk, waits for all, and returns how those that failed ended.

    Whoever calls this has read the ledger: a retry sends what is missing and nothing else, and a chunk whose run from an earlier
    try is still open is waited for, not sent twice. When the caller is cancelled, so are the runs that it sent.
    """
    if not chunks:
        return {}
    artifact = cast(UUID, create_progress_artifact(progress=0.0, key="extraction", description="sending the chunks"))
    with get_client(sync_client=True) as client:
        campaign = _Campaign(client, settings, {chunk.key[:16]: chunk for chunk in chunks}, artifact)
        try:
            campaign.adopt()
            campaign.send_all()
            return campaign.wait()
        except BaseException:
            campaign.cancel()
            raise


@dataclass
class _Open:
    """A chunk's run that has not ended; `without_lease_since` (monotonic) while a worker has it and it holds no lease."""

    chunk: Chunk
    name: str
    sends: int
    without_lease_since: float | None = None


@dataclass
class _Campaign:
    client: SyncPrefectClient
    settings: SessionSettings
    chunks: Mapping[str, Chunk]
    artifact: UUID
    open: dict[UUID, _Open] = field(default_factory=dict[UUID, _Open])
    failed: dict[int, str] = field(default_factory=dict[int, str])

    @property
    def _store_tag(self) -> str:
        return f"store-{hashlib.blake2b(str(self.settings.store).encode(), digest_size=4).hexdigest()}"

    def adopt(self) -> None:
        """Takes over runs of these chunks that an earlier try has sent and that have not ended."""
        wanted = FlowRunFilter(
            tags=FlowRunFilterTags(all_=[self._store_tag]),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=OPEN_STATES)),
        )
        taken: set[str] = set()
        for page in range(1_000):
            runs = self.client.read_flow_runs(flow_run_filter=wanted, limit=PAGE, offset=page * PAGE)
            for run in runs:
                key = next((tag.removeprefix("chunk-") for tag in run.tags if tag.startswith("chunk-")), "")
                if key in self.chunks and key not in taken:
                    taken.add(key)
                    self.open[run.id] = _Open(self.chunks[key], run.name, 1)
            if len(runs) < PAGE:
                break
        if self.open:
            say(f"{len(self.open)} chunks are still with hosts from an earlier try: waited for, not sent again")

    def send_all(self) -> None:
        """Sends the chunks that have no open run."""
        have = {one.chunk.index for one in self.open.values()}
        for chunk in self.chunks.values():
            if chunk.index not in have:
                self._send(chunk, 1)

    def wait(self) -> dict[int, str]:
        """Until every chunk has ended; returns how those that failed did."""
        while self.open:
            found = {run.id: run for run in self._read(sorted(self.open))}
            for run_id in sorted(self.open):
                if run_id in found:
                    self._look_at(found[run_id])
                else:
                    self._again(self.open.pop(run_id), "its run was deleted")
            if self.open:
                time.sleep(POLL_SECONDS)
        return self.failed

    def cancel(self) -> None:
        """Ends what was sent."""
        cancel_sent(self.client, self.open, "the run that sent this chunk has ended")

    def _look_at(self, run: FlowRun) -> None:
        if run.state is None:
            return
        if run.state.is_final():
            self._ended(run)
        elif run.state.type in (StateType.PENDING, StateType.RUNNING) and (why := self._lost(run.id)):
            self.client.set_flow_run_state(run.id, Crashed(message=f"host lost: {why}"), force=True)
            forget_activity(self.settings.store, str(run.id))
            self._again(self.open.pop(run.id), f"its host is lost ({why})")

    def _lost(self, run_id: UUID) -> str:
        """Why a run that a worker has taken counts as lost; empty while it does not."""
        one, activity = self.open[run_id], activity_of(self.settings.store, str(run_id))
        if activity == "ended":
            return "its lease ended"
        if activity == "live":
            one.without_lease_since = None
            return ""
        now = time.monotonic()
        one.without_lease_since = one.without_lease_since or now
        return f"no lease for {START_SECONDS:.0f} s" if now - one.without_lease_since > START_SECONDS else ""

    def _ended(self, run: FlowRun) -> None:
        one, state = self.open.pop(run.id), run.state
        assert state is not None
        forget_activity(self.settings.store, str(run.id))
        message = state.message or ""
        if state.is_crashed() or (state.is_failed() and message.partition(":")[0] in HOST_REASONS):
            self._again(one, f"it ended {state.name}: {message}")
        elif not state.is_completed():
            self._fail(one, f"run {one.name} ended {state.name}: {message}")
        else:
            self._say_progress()

    def _again(self, one: _Open, why: str) -> None:
        """Sends a chunk once more, for another host, unless it has met too many."""
        if one.sends >= MOST_SENDS:
            self._fail(one, f"run {one.name}: {why}; sent {one.sends} times")
            return
        say(f"chunk {one.chunk.index}: {why}; sent again for another host")
        self._send(one.chunk, one.sends + 1)

    def _fail(self, one: _Open, message: str) -> None:
        self.failed[one.chunk.index] = message
        self._say_progress()

    def _say_progress(self) -> None:
        done = len(self.chunks) - len(self.open)
        line = f"{done} of {len(self.chunks)} chunks ended, {len(self.failed)} of them failed"
        say(line)
        update_progress_artifact(self.artifact, progress=round(100 * done / len(self.chunks), 2), description=line)

    def _send(self, chunk: Chunk, sends: int) -> None:
        which = ChunkParameters(
            dataset=str(self.settings.dataset),
            store=str(self.settings.store),
            index=chunk.index,
            keep_free_gb=self.settings.keep_free_bytes / 1e9,
        )
        parameters: dict[str, Any] = {
            "chunk": which.model_dump(mode="json"),
            "engine": ChunkEngineParameters.of(self.settings.engine).model_dump(mode="json"),
            "extraction": self.settings.extraction.model_dump(mode="json"),
        }
        name = f"chunk {chunk.index} of {Path(self.settings.dataset).name[:12]}, {chunk.tokens:,} tokens"
        if sends > 1:
            name += f", sent {sends} times"
        tags = [self._store_tag, f"chunk-{chunk.key[:16]}"]
        run = cast(FlowRun, run_deployment(DEPLOYMENT, parameters=parameters, flow_run_name=name, timeout=0, tags=tags))
        self.open[run.id] = _Open(chunk, run.name, sends)

    def _read(self, run_ids: list[UUID]) -> Iterable[FlowRun]:
        for start in range(0, len(run_ids), PAGE):
            some = FlowRunFilter(id=FlowRunFilterId(any_=run_ids[start : start + PAGE]))
            yield from self.client.read_flow_runs(flow_run_filter=some, limit=PAGE)
