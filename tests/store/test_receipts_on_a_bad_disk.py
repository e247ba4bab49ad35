"""Receipts when the disk is full or fails: no line is half-written, and no receipt is given for what may be lost."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from data_contracts.receipt import Receipt
from drafter_data.store.receipts import ReceiptLog


def receipt(number: int) -> Receipt:
    """A receipt of its own."""
    return Receipt(
        state_key=f"{number:040x}", tokens=1, shape=(1, 2, 4), dtype="F32", bytes=100, xxh3="0" * 32, proof="label", chunk="c"
    )


def append(log: ReceiptLog, one: Receipt) -> None:
    log.write([one])
    log.sync()


@pytest.mark.parametrize(("taken", "kept"), [(30, [1, 3]), (300, [1, 2, 3])])
def test_receipt_short_write_leaves_whole_lines_and_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int, kept: list[int]
) -> None:
    log = ReceiptLog(tmp_path, "w")
    append(log, receipt(1))
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real_write(descriptor, data[:taken]))
    with pytest.raises(OSError, match="No space left"):
        log.write([receipt(2), receipt(4), receipt(5)])  # some 200 bytes each
    monkeypatch.undo()
    append(log, receipt(3))
    fresh = ReceiptLog(tmp_path, "x")
    fresh.refresh()
    assert sorted(int(found.state_key, 16) for found in fresh.all()) == kept


def test_receipt_failed_fsync_is_told_to_every_thread_that_waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = ReceiptLog(tmp_path, "w")
    append(log, receipt(0))

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(append, log, receipt(number)) for number in range(1, 17)]
    assert all(isinstance(future.exception(), OSError) for future in futures)
    assert len(log) == 1


def test_receipt_line_that_only_looks_like_one_does_not_count(tmp_path: Path) -> None:
    good = receipt(1).model_dump_json()
    (tmp_path / "c.w.jsonl").write_text(good[:80] + receipt(2).model_dump_json() + "\n" + good + "\n")
    log = ReceiptLog(tmp_path, "x")
    log.refresh()
    assert [int(found.state_key, 16) for found in log.all()] == [1]
    assert log.find(f"{2:040x}") is None
