"""Who works on a store: every run says so with a lease of its own, beside the leases of its chunks.

Runs that extract, here or on other hosts, work side by side. What must not overlap asks first: the nightly run starts only where
nobody works (`ALONE_AT_FIRST`), and what removes states keeps others from coming, too (`ALONE`).
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Literal

from drafter_data.errors import InputError, LeaseHeld
from drafter_data.hosts import this_host
from drafter_data.store.leases import Lease, Leases

RUN_PREFIX, NAMED_PREFIX, ALONE_PREFIX = "run-", "named-", "alone-"
ASKED_FOR_SECONDS = 3600.0
"""So long after its end a named lease stays, for the one who asks for it."""


class Beside(Enum):
    """Whom a run can bear beside it."""

    OTHERS = "others"
    ALONE_AT_FIRST = "alone at first"
    ALONE = "alone"


@contextmanager
def working(store_root: Path, what: str, *, beside: Beside = Beside.OTHERS, key: str | None = None) -> Generator[None]:
    """Holds a lease that says `what` is going on. The store itself need not be there yet.

    `key` names the lease for those who ask for it (`activity_of`). Raises LeaseHeld (`store-busy`) when that may not be beside what
    is going on now, InputError (`store-not-writable`) where no lease can be written.
    """
    prefix = ALONE_PREFIX if beside is Beside.ALONE else NAMED_PREFIX if key else RUN_PREFIX
    name = prefix + (key or secrets.token_hex(6))
    leases = _leases_of(store_root)
    try:
        _sweep(leases)
        with leases.hold(name, f"{what} (pid {os.getpid()})", lambda live: _check(store_root, live, beside)):
            yield
    finally:
        leases.close()


def activity_of(store_root: Path, key: str) -> Literal["live", "ended", "none"]:
    """Whether the run that works under `key` lives, has died without giving its lease back, or holds none (before it, or after)."""
    leases = Leases(store_root / "leases")
    found = leases.find(NAMED_PREFIX + key)
    if found is None:
        return "none"
    return "live" if found[1] else "ended"


def forget_activity(store_root: Path, key: str) -> None:
    """Removes what a run that has died left of its lease."""
    Leases(store_root / "leases").remove_ended(NAMED_PREFIX + key)


def host_label() -> str:
    """This process and host, for people."""
    return f"pid {os.getpid()} on {this_host().host_name}"


def _leases_of(store_root: Path) -> Leases:
    folder = store_root / "leases"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot make a store at {store_root}: {error.strerror}; name a writable folder", reason="store-not-writable"
        ) from error
    return Leases(folder)


def _check(store_root: Path, live: Mapping[str, Lease], beside: Beside) -> None:
    """Called while no other lease can be taken."""
    in_the_way = [lease for key, lease in live.items() if beside is not Beside.OTHERS or key.startswith(ALONE_PREFIX)]
    if in_the_way:
        first = in_the_way[0]
        raise LeaseHeld(
            f"store {store_root} is being worked on: {first.holder} on {first.host}"
            + (f" and {len(in_the_way) - 1} more" if len(in_the_way) > 1 else "")
            + "; wait for it, or stop it",
            reason="store-busy",
        )


def _sweep(leases: Leases) -> None:
    """Takes away what killed runs left: nobody takes over their leases, unlike a chunk's."""
    for key, (lease, live) in leases.all().items():
        old = lease.expires_at + ASKED_FOR_SECONDS < time.time()
        if not live and key.startswith((RUN_PREFIX, ALONE_PREFIX) if not old else (RUN_PREFIX, ALONE_PREFIX, NAMED_PREFIX)):
            leases.remove_ended(key)
