"""Reading pieces side by side in processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Final

from drafter_data.errors import DrafterDataError
from drafter_data.runs.options import MergeOptions
from drafter_data.runs.units import Unit
from drafter_data.runs.worker import TokenizerNote, UnitReport, Worker

SMALL_BYTES: Final = 24 << 20
"""Below this, starting processes takes longer than it saves."""
_MOST_WORKERS: Final = 8
_worker: Worker | None = None


def process_units(
    units: Sequence[Unit], folder: Path, partitions: int, options: MergeOptions, *, workers: int | None, keys_only: bool = False
) -> tuple[list[UnitReport], TokenizerNote]:
    """Processes all pieces; returns their reports in order, and which tokenizer it was.

    A tokenizer that cannot be loaded is refused before anything is read. Raises the first failure; nothing runs on after it.

    `workers` None takes all CPUs that this process may use (at most 8), or none beside this one for small input.
    """
    count = min(_wanted(units) if workers is None else workers, len(units))
    if count <= 1 or any(unit.file.url.startswith("memory://") for unit in units):
        worker = Worker(folder, partitions, options, keys_only=keys_only)
        note = worker.describe_tokenizer()
        reports = [worker.process(unit) for unit in units]
        worker.close()
        return reports, note
    context = multiprocessing.get_context("spawn")  # a fork of a threaded process can hang
    with ProcessPoolExecutor(count, context, _start, (folder, partitions, options, keys_only)) as pool:
        try:
            with _interrupts_held_back():  # the processes start here, and inherit that
                described = pool.submit(_describe)
            note = described.result()
            futures = [pool.submit(_process, unit) for unit in units]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            return [future.result() for future in futures], note
        except BrokenProcessPool as error:
            raise DrafterDataError(
                "a reading process died without a word (killed for memory?); merge again with fewer `--workers`",
                reason="worker-lost",
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _wanted(units: Sequence[Unit]) -> int:
    size = sum({unit.file.url: unit.file.size_bytes for unit in units}.values())
    return 1 if size < SMALL_BYTES else min(len(os.sched_getaffinity(0)), _MOST_WORKERS)


@contextmanager
def _interrupts_held_back() -> Generator[None]:
    """SIGINT waits until it is over."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(folder: Path, partitions: int, options: MergeOptions, keys_only: bool) -> None:
    global _worker  # noqa: PLW0603 - one worker a process, made once
    # A terminal's SIGINT ends a reader without a word: the process that started it tells the user, and clears up.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if not options.tokenize.trust_remote_code:
        sys.modules.setdefault("torch", None)  # pyright: ignore[reportArgumentType]  # transformers would import it: 250 MB a reader
    _worker = Worker(folder, partitions, options, keys_only=keys_only)


def _describe() -> TokenizerNote:
    if _worker is None:
        raise AssertionError("the pool starts its workers before it gives them work")
    return _worker.describe_tokenizer()


def _process(unit: Unit) -> UnitReport:
    if _worker is None:
        raise AssertionError("the pool starts its workers before it gives them work")
    return _worker.process(unit)


def _end_with_parent() -> None:
    """A killed merge leaves no processes behind."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for([parent.sentinel])
        os._exit(1)
