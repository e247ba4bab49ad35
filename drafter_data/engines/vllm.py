"""vLLM behind the Engine seam: files of its hidden-states connector, claimed by request id and token ids.

What is known of it (0.32): the reply names the file, and comes before the file is whole. Beside it lies `<file>.lock`, which the
server holds exclusively until it is: a shared lock, taken with a time limit, is the proof. The request id (`X-Request-Id`) is part
of the file's name. Left-overs are never removed by the server.

Tensor legend: S tokens, L stored layers, H hidden size.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
from itertools import count
from threading import Event

import numpy as np

from data_contracts.dump import RID_PREFIX
from data_contracts.identity import StoreIdentity
from drafter_data.claiming.folder import DumpFolder, plain_name
from drafter_data.engines.base import ClaimedDump, EngineInfo, PrefillReply, PrefillRequest
from drafter_data.engines.vllm_http import VllmClient
from drafter_data.errors import DumpMissing, DumpRejected, SampleError
from drafter_data.foreign_file import ForeignFile
from drafter_data.safetensors_file import MalformedFile

LOCK_SUFFIX = ".lock"
LIFE_SECONDS = 30.0
MAX_HEADER_BYTES = 1 << 16
_RUN_LOCK = re.compile(r"\.dd-run-([0-9a-f]{8})\.lock")
_OURS = re.compile(r"cmpl-" + re.escape(RID_PREFIX) + r"([0-9a-f]{8})-\d+-")


class VllmEngine:
    """A vLLM server and the folder that its connector writes to."""

    def __init__(self, client: VllmClient, info: EngineInfo, folder: DumpFolder) -> None:
        self._client = client
        self._info = info
        self._folder = folder
        self._run = secrets.token_hex(4)
        self._numbers = count()
        self._last_dump_at = time.monotonic()
        self._stopped = Event()
        folder.lock(_run_lock(self._run), f"run {self._run}, process {os.getpid()}")

    def describe(self) -> EngineInfo:
        """What the engine is and allows."""
        return self._info

    def describing(self, info: EngineInfo) -> VllmEngine:
        """The same connection, once a probe has shown what it writes."""
        self._info = info
        return self

    def new_request_id(self) -> str:
        """A request id that was never used before."""
        return f"{RID_PREFIX}{self._run}-{next(self._numbers)}"

    def send(self, request: PrefillRequest) -> PrefillReply:
        """Prefills one prompt; blocks until the reply."""
        return self._client.complete(request)

    def claim(self, request: PrefillRequest, reply: PrefillReply, deadline: float) -> ClaimedDump:
        """Waits until the reply's file is whole. Raises DumpMissing, or DumpRejected with what differs."""
        name = self._named(request, reply)
        self._wait_unlocked(request, name, deadline)
        try:
            dump = open_dump(self._folder, name, request, self._info.identity)
        except FileNotFoundError as error:
            raise DumpMissing(
                f"request {request.request_id}: vLLM gave {name} free without writing it; is {self._folder.path} full?"
            ) from error
        self._last_dump_at = time.monotonic()
        return dump

    def _named(self, request: PrefillRequest, reply: PrefillReply) -> str:
        """The file's plain name. The reply is only trusted as far as it names a file of this request in our folder."""
        parameters = reply.meta.get("kv_transfer_params")
        path = parameters.get("hidden_states_path") if isinstance(parameters, dict) else None
        if not isinstance(path, str):
            raise DumpMissing(
                f"request {request.request_id}: the reply names no file: start vLLM with the command that "
                "`drafter-data engine vllm --print` prints (--kv-transfer-config)",
                reason="no-capture-hook",
            )
        folder, _, name = path.rpartition("/")
        if folder != str(self._folder.path):
            raise DumpRejected(
                f"request {request.request_id}: the reply names {path[:200]!r}, not in the dump folder {self._folder.path}: "
                "nothing there is touched",
                reason="hostile-name",
            )
        if not plain_name(name).startswith(f"cmpl-{request.request_id}-"):
            raise DumpRejected(
                f"request {request.request_id}: the reply names another request's file {name!r}", reason="label-differs"
            )
        return name

    def _wait_unlocked(self, request: PrefillRequest, name: str, deadline: float) -> None:
        """Returns when a shared lock beside the file could be had."""
        pause = 0.0005
        while True:
            try:
                descriptor = self._folder.open_file(name + LOCK_SUFFIX)
            except FileNotFoundError:
                descriptor = -1
            if descriptor >= 0:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return
                except BlockingIOError:
                    pass
                finally:
                    os.close(descriptor)
            if time.monotonic() >= deadline:
                state = "still locked" if descriptor >= 0 else "without a lock file"
                raise DumpMissing(f"request {request.request_id} ({request.tokens} tokens): {name} was {state} in time")
            if self._stopped.wait(pause):
                raise DumpMissing(f"request {request.request_id}: no longer waited for", reason="interrupted")
            pause = min(pause * 2, 0.02)

    def release(self, dump: ClaimedDump) -> None:
        """Removes a claimed dump and its lock file."""
        dump.close()
        for name in dump.entries:
            self._folder.remove(name)

    def abandon(self, request: PrefillRequest) -> None:
        """Removes what a failed request has left so far; what it leaves later goes at close."""
        self._remove_beginning(f"cmpl-{request.request_id}-")

    def _remove_beginning(self, prefix: str) -> None:
        for name in self._folder.names():
            if name.startswith(prefix):
                self._folder.remove(name)

    def sweep(self) -> int:
        """Removes the files of our own runs whose process is gone; returns how many."""
        of_run = {name: run for name in self._folder.names() if (run := _run_of(name)) not in (None, self._run)}
        dead = {run for run in set(of_run.values()) if run and self._folder.remove_dead_lock(_run_lock(run))}
        left = [name for name, run in of_run.items() if run in dead and name != _run_lock(run or "")]
        for name in left:
            self._folder.remove(name)
        return sum(not name.endswith(LOCK_SUFFIX) for name in left)

    def free_bytes(self) -> int:
        """Bytes that can still be written to the dump folder."""
        return self._folder.free_bytes()

    def alive(self) -> bool:
        """Whether the engine answers, or has dumped in the last half minute: a busy engine is alive."""
        return self._client.healthy() or time.monotonic() - self._last_dump_at < LIFE_SECONDS

    def interrupt(self) -> None:
        """Ends all waiting for replies and dumps, for good."""
        self._client.interrupt()
        self._stopped.set()

    def close(self) -> None:
        """Removes what is left of this run and gives back the dump folder."""
        self._remove_beginning(f"cmpl-{RID_PREFIX}{self._run}-")
        self._folder.remove(_run_lock(self._run))
        self._folder.close()


def open_dump(folder: DumpFolder, name: str, request: PrefillRequest, identity: StoreIdentity | None) -> ClaimedDump:
    """Opens a whole file and checks that it is this request's. Raises FileNotFoundError or DumpRejected."""
    descriptor = folder.open_file(name)
    try:
        file = ForeignFile(descriptor, name, MAX_HEADER_BYTES)
    except MalformedFile as error:
        raise DumpRejected(f"dump {error}", reason="dump-malformed") from error
    try:
        states_slh, ids_s = file.rows("hidden_states"), file.array("token_ids")
        if not np.array_equal(ids_s, request.token_ids_s):
            raise DumpRejected(f"dump {name}: its {len(ids_s)} token ids are not the {request.tokens} sent", reason="token-ids")
        expected = None if identity is None else (request.tokens, len(identity.layers), identity.hidden_size)
        if states_slh.ndim != 3 or (expected is not None and states_slh.shape != expected):
            raise DumpRejected(f"dump {name}: expected states {expected}, found {states_slh.shape}", reason="shape")
    except MalformedFile as error:
        file.close()
        raise DumpRejected(f"dump {error}", reason="dump-malformed") from error
    except SampleError:
        file.close()
        raise
    return ClaimedDump(
        request_id=request.request_id,
        states_slh=states_slh,
        dtype=file.tensors["hidden_states"].dtype,  # pyright: ignore[reportArgumentType]  # commit compares it with the store's
        token_ids_s=ids_s,
        proof="label",
        proof_error=None,
        entries=(name, name + LOCK_SUFFIX),
        close=file.close,
    )


def _run_of(name: str) -> str | None:
    """The run that a file's name, or a run lock's, tells."""
    match = _OURS.match(name) or _RUN_LOCK.fullmatch(name)
    return match[1] if match else None


def _run_lock(run: str) -> str:
    return f".dd-run-{run}.lock"
