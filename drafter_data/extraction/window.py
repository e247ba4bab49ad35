"""The one in-flight window of an engine, shared by all chunks of the process.

It bounds requests and bytes in flight, keeps two prompts of one length apart where dumps carry no label, and lets a request go
alone when a claim was ambiguous.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass


class Window:
    """Counts what is in flight. Bytes stay counted until the dump has left the dump folder, after the request slot is
    free again.
    """

    def __init__(self, *, requests: int, lengths_must_differ: bool, most_bytes: int) -> None:
        self._limit = requests
        self._lengths_must_differ = lengths_must_differ
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._waiting: list[_Waiter] = []
        self._requests = 0
        self._bytes = 0
        self._lengths: set[int] = set()
        self._planned: Counter[int] = Counter()
        self._alone_waiting = 0
        self._exclusive = False

    @property
    def in_flight(self) -> int:
        """Requests open now."""
        return self._requests

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of dumps that are due or not yet stored."""
        return self._bytes

    @property
    def limit(self) -> int:
        """Most requests open at once."""
        return self._limit

    def set_limit(self, requests: int) -> None:
        """Changes the limit; what is open stays open."""
        with self._lock:
            if requests != self._limit:
                self._limit = requests
                self._serve()

    def pick(self, lengths: Iterable[int]) -> int:
        """Place of the first of the waiting prompts' `lengths` that no worker has taken yet, else 0; `forget` gives it back.

        A worker that took a length twice over would only wait in `slot` while others could go.
        """
        with self._lock:
            chosen = first = None
            for place, tokens in enumerate(lengths):
                first = tokens if first is None else first
                if not self._lengths_must_differ or not self._planned[tokens]:
                    chosen = (place, tokens)
                    break
            assert first is not None, "no prompts wait"
            place, tokens = chosen or (0, first)
            self._planned[tokens] += 1
            return place

    def forget(self, tokens: int) -> None:
        """The worker has done with a prompt of that length."""
        with self._lock:
            self._planned[tokens] -= 1
            if not self._planned[tokens]:
                del self._planned[tokens]

    @contextmanager
    def space(self, size: int) -> Generator[None]:
        """Reserves bytes in the dump folder; one dump larger than the bound may still go, alone."""

        def take() -> bool:
            if self._bytes and self._bytes + size > self._most_bytes:
                return False
            self._bytes += size
            return True

        with self._lock:
            self._wait(take)
        try:
            yield
        finally:
            with self._lock:
                self._bytes -= size
                self._serve()

    @contextmanager
    def slot(self, tokens: int, *, alone: bool = False, urgent: bool = False) -> Generator[int]:
        """Waits for a request slot; yields how many requests are then open, this one included. What is urgent goes before others:
        a sample that is already extracted waits for it.
        """
        open_now = 0

        def take() -> bool:
            nonlocal open_now
            if not self._may_go(tokens, alone):
                return False
            self._alone_waiting -= alone
            self._exclusive = self._exclusive or alone
            self._requests += 1
            self._lengths.add(tokens)
            open_now = self._requests
            return True

        with self._lock:
            self._alone_waiting += alone
            self._wait(take, urgent=urgent)
        try:
            yield open_now
        finally:
            with self._lock:
                self._requests -= 1
                self._lengths.discard(tokens)
                if alone:
                    self._exclusive = False
                self._serve()

    def _wait(self, take: Callable[[], bool], *, urgent: bool = False) -> None:
        """Returns once `take` has taken what it wants (under the lock)."""
        if take():
            return
        waiter = _Waiter(take, threading.Condition(self._lock))
        self._waiting.insert(0 if urgent else len(self._waiting), waiter)
        while not waiter.served:
            waiter.changed.wait()

    def _serve(self) -> None:
        """Lets those go that now may, the longest waiting first. Each has a condition of its own: to wake all of many threads for
        every change would cost more than the requests.
        """
        left: list[_Waiter] = []
        for waiter in self._waiting:
            if waiter.take():
                waiter.served = True
                waiter.changed.notify()
            else:
                left.append(waiter)
        self._waiting = left

    def _may_go(self, tokens: int, alone: bool) -> bool:
        if self._exclusive:
            return False
        if alone:
            return self._requests == 0
        if self._alone_waiting or self._requests >= self._limit:
            return False
        return not (self._lengths_must_differ and tokens in self._lengths)


@dataclass
class _Waiter:
    take: Callable[[], bool]
    changed: threading.Condition
    served: bool = False
