"""Checking many state files. Small ones are checked by whoever asks for the results, since threads would hand the interpreter to
and fro; those that are not in the page cache are brought there before their turn, many at once. Large ones are checked in threads,
each of which reads in order: the kernel reads ahead by itself, and better (benchmarks/NOTES.md).

What good content looks like is learnt from the store itself: from up to 512 states that are picked by their keys, which are hashes.
They are checked first, and judged once all of them are known.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np

from data_contracts.receipt import Receipt
from drafter_data.files import is_cached, page_aligned, read_through
from drafter_data.store.store import Store
from drafter_data.validation.reference import SAMPLES, Reference
from drafter_data.validation.state_file import CheckedState, Measured, check_state_file, read_signature

SMALL_BYTES = 8 << 20
"""Below, states are brought where they are not cached, and read at once."""
BATCH_BYTES = 8 << 20
"""Small states are brought some at a time: waking a thread costs as much as checking one."""
BATCHES_AHEAD = 8
FIRST_BYTES = 1 << 20
"""Of a large state, read at once. Linux then begins to read ahead with much and in small pages, as for `cat`; what begins with a
header alone soon lies in pages of 2 MB, which on a virtual machine may be memory that the host took back (benchmarks/NOTES.md).
"""
READERS, READ_BYTES = 4, 1 << 20
"""Threads that read ahead, and how much at once; slow storage has that many requests to work on."""


def check_states(store: Store, workers: int, wanted: Callable[[str], bool] = lambda _: True) -> Iterator[CheckedState]:
    """Checks every state that has a receipt and whose key is `wanted`, in no order."""

    reference: Reference | None = None

    def check(receipt: Receipt, room: memoryview | None = None) -> CheckedState:
        return check_state_file(store.path_of(receipt.state_key), receipt, store.identity, reference, room)

    picked = heapq.nsmallest(SAMPLES, store.keys())
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="validate") as pool:
        receipts = (receipt for key in picked if (receipt := store.find(key)) is not None)
        first = list(_in_batches(store, pool, receipts, wanted, check))
        reference = _learn(store, first)
        for one in first:
            if wanted(one.receipt.state_key):
                right = reference is None or one.measured is None or reference.fits(*one.measured)
                yield one if right else check(one.receipt)
        first.clear()
        known = set(picked)
        rest = (one for one in store.receipts() if one.state_key not in known and wanted(one.state_key))
        yield from _in_batches(store, pool, rest, wanted, check)


def _learn(store: Store, first: Iterable[CheckedState]) -> Reference | None:
    """None where the store holds too few states to tell. Also those count here that something else is wrong with."""
    room = page_aligned(SMALL_BYTES)

    def read(receipt: Receipt) -> Measured | None:
        return read_signature(store.path_of(receipt.state_key), receipt, store.identity, room if _is_small(receipt) else None)

    found = (one.measured or read(one.receipt) for one in first)
    return Reference.learn(store.identity.layers, [one for one in found if one is not None and np.isfinite(one[0].shape_ll).all()])


def _in_batches(
    store: Store,
    pool: ThreadPoolExecutor,
    receipts: Iterable[Receipt],
    wanted: Callable[[str], bool],
    check: Callable[[Receipt, memoryview | None], CheckedState],
) -> Iterator[CheckedState]:
    """Results in the order of the batches, of which a bounded number wait or are being brought. What is not wanted is neither read
    nor checked.
    """

    def bring(batch: list[Receipt]) -> None:
        room = page_aligned(READ_BYTES)
        for receipt in batch:
            if wanted(receipt.state_key):
                read_through(store.path_of(receipt.state_key), receipt.bytes, room)

    def check_all(batch: list[Receipt], room: memoryview, brought: Future[None] | None = None) -> list[CheckedState]:
        if brought is not None:
            brought.result()
        return [check(receipt, room) if wanted(receipt.state_key) else CheckedState(receipt, None) for receipt in batch]

    def check_large(batch: list[Receipt]) -> list[CheckedState]:
        if not hasattr(threads, "room"):
            threads.room = page_aligned(FIRST_BYTES)
        return check_all(batch, threads.room)

    def are_cached(batch: list[Receipt]) -> bool:
        read = [receipt for receipt in batch if wanted(receipt.state_key)]
        return all(is_cached(store.path_of(receipt.state_key), receipt.bytes) for receipt in read[:1] + read[-1:])

    room, threads = page_aligned(SMALL_BYTES), threading.local()
    waiting: deque[Callable[[], list[CheckedState]]] = deque()
    with ThreadPoolExecutor(READERS, thread_name_prefix="read") as readers:
        for batch in _batches(receipts):
            if _is_small(batch[0]):
                brought = None if are_cached(batch) else readers.submit(bring, batch)
                waiting.append(partial(check_all, batch, room, brought))
            else:
                waiting.append(pool.submit(check_large, batch).result)
            if len(waiting) >= BATCHES_AHEAD:
                yield from waiting.popleft()()
        while waiting:
            yield from waiting.popleft()()


def _batches(receipts: Iterable[Receipt]) -> Iterator[list[Receipt]]:
    """A large state, or some small ones."""
    batch, size = list[Receipt](), 0
    for receipt in receipts:
        if not _is_small(receipt):
            yield [receipt]
            continue
        batch.append(receipt)
        size += receipt.bytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _is_small(receipt: Receipt) -> bool:
    return receipt.bytes < SMALL_BYTES
