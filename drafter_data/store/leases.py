"""Leases: one holder a chunk, named, ended by itself.

A lease is a small file with its holder and an expiry that a thread renews. It may be taken over when it has expired, when it has
not been renewed for as long as it lasts (by this process's own clock: another host's may be wrong), or at once when its holder was
a process that could be seen from here and is no longer there.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from pydantic import ValidationError

from data_contracts.record import Record
from drafter_data.errors import LeaseHeld
from drafter_data.files import TEMPORARY_PREFIX, exclusive, write_atomic
from drafter_data.hosts import LEASE_SECONDS, this_host

RENEW_SECONDS = 15.0
RENEWALS_A_LEASE = 4


class Lease(Record):
    """Who holds a chunk, or works on the store, until when; it is renewed at least every `seconds`.

    `process` is `<boot id>/<pid namespace>/<pid>/<start ticks>`, which no later one repeats.
    """

    holder: str
    host: str
    process: str
    expires_at: float
    seconds: float = LEASE_SECONDS


class Leases:
    """The leases of a store that this process holds or asks for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._locks = folder.parent / "locks"
        self._host = this_host()
        self._held: dict[str, Lease] = {}
        self._seen: dict[str, tuple[Lease, float]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._renewer: threading.Thread | None = None

    @contextmanager
    def hold(self, key: str, holder: str, among: Callable[[Mapping[str, Lease]], None] | None = None) -> Generator[None]:
        """Holds `key`. Raises LeaseHeld, with the holder named, when another live holder has it.

        `among` is given all live leases while nobody else can take one, and may refuse by raising.
        """
        with self._guard():
            self._sweep()
            current = self._read(key)
            if current is not None and self._is_live(key, current):
                raise LeaseHeld(
                    f"chunk {key[:12]} is held by {current.holder} on {current.host} until "
                    f"{time.strftime('%H:%M:%S', time.localtime(current.expires_at))}; wait, or stop that run"
                )
            if among is not None:
                among({name: lease for name, (lease, live) in self.all().items() if live})
            lease = Lease(
                holder=holder,
                host=self._host.host_name,
                process=own_process(),
                expires_at=self._expiry(),
                seconds=self._host.lease_seconds,
            )
            write_atomic(self._path(key), lease.model_dump_json())
        with self._lock:
            self._held[key] = lease
            if self._renewer is None:
                self._renewer = threading.Thread(target=self._renew, name="lease-renewer", daemon=True)
                self._renewer.start()
        try:
            yield
        finally:
            with self._lock:
                del self._held[key]
            with self._guard():
                if self._is_ours(key):
                    self._path(key).unlink(missing_ok=True)

    def all(self) -> dict[str, tuple[Lease, bool]]:
        """Every lease by chunk key, and whether its holder lives (as far as this host can tell)."""
        keys = [path.stem for path in self._folder.glob("*.json")]
        leases = ((key, self._read(key)) for key in sorted(keys))
        return {key: (lease, self._is_live(key, lease)) for key, lease in leases if lease is not None}

    def find(self, key: str) -> tuple[Lease, bool] | None:
        """The lease of `key`, and whether its holder lives; None where there is none."""
        lease = self._read(key)
        return None if lease is None else (lease, self._is_live(key, lease))

    def remove_ended(self, key: str) -> bool:
        """Removes the lease of a holder that is gone; says whether it did."""
        with self._guard():
            lease = self._read(key)
            if lease is not None and self._is_live(key, lease):
                return False
            self._path(key).unlink(missing_ok=True)
            return True

    def _sweep(self) -> None:
        """Removes what killed writers left: every writer of a lease has the guard, so none of it is under way."""
        for path in self._folder.glob(f"{TEMPORARY_PREFIX}*"):
            path.unlink(missing_ok=True)

    def _renew(self) -> None:
        while not self._stop.wait(min(RENEW_SECONDS, self._host.lease_seconds / RENEWALS_A_LEASE)):
            with self._lock:
                held = list(self._held)
            for key in held:
                with suppress(OSError):  # a full disk or a stale mount: tried again at the next tick, within the lease
                    self._renew_one(key)

    def _renew_one(self, key: str) -> None:
        """Extends a lease that is still ours: after a long stop another holder may have taken it."""
        with self._guard(), self._lock:
            if key in self._held and self._is_ours(key):
                self._held[key] = renewed = self._held[key].model_copy(update={"expires_at": self._expiry()})
                write_atomic(self._path(key), renewed.model_dump_json())

    def _is_live(self, key: str, lease: Lease) -> bool:
        """Whether a lease's holder may still be at work, as far as can be told from here."""
        where, pid, ticks = lease.process.rsplit("/", 2)
        if lease.host == self._host.host_name and where == _here() and _start_ticks(int(pid)) != ticks:
            return False
        with self._lock:
            known = self._seen.get(key)
            if known is None or known[0] != lease:
                known = self._seen[key] = (lease, time.monotonic())
        return time.time() <= lease.expires_at and time.monotonic() - known[1] <= lease.seconds

    def _is_ours(self, key: str) -> bool:
        lease = self._read(key)
        return lease is not None and lease.process == own_process()

    def _expiry(self) -> float:
        return time.time() + self._host.lease_seconds

    def close(self) -> None:
        """Stops renewing."""
        self._stop.set()

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"

    def _read(self, key: str) -> Lease | None:
        try:
            return Lease.model_validate_json(self._path(key).read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def _guard(self) -> AbstractContextManager[None]:
        """One taker at a time, across processes and hosts."""
        return exclusive(self._locks / "leases")


def own_process() -> str:
    """This process, named so that a later process with the same id, or one of another container, differs."""
    return f"{_here()}/{os.getpid()}/{_start_ticks(os.getpid())}"


def _here() -> str:
    """Where process ids mean what they mean here: this boot of this kernel, and this pid namespace."""
    return f"{_boot_id()}/{os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116 - the link leads to no path


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _start_ticks(pid: int) -> str | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()[19]
