"""Ingest alone: dumps of 1-150 MB made safe in the store (read, checked, hashed, fsynced, with a receipt), against `cp` + `sync`.

The dumps lie ready, labelled, as the engine leaves them; threads claim and commit them as the extraction loop does. Both sides move
the same bytes and take turns; the ratio of the medians counts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.reporting import Cell, Result, every, median, publish
from benchmarks.world import RAM_DISK, copy_and_sync, work_folder
from data_contracts.dump import HEADER_BYTES, RID_PREFIX, name_of
from data_contracts.identity import StoreIdentity, state_key
from data_contracts.receipt import Receipt
from drafter_data.claiming.folder import DumpFolder
from drafter_data.claiming.labelled import LabelledClaims
from drafter_data.embedded.dumps import header_bytes
from drafter_data.engines.base import PrefillReply, PrefillRequest
from drafter_data.extraction.session import COMMIT_THREADS
from drafter_data.store.store import Store

LAYERS, HIDDEN = (2, 16, 29, 32), 4096
ROW_BYTES = len(LAYERS) * HIDDEN * 2
IDENTITY = StoreIdentity(
    weights_digest="benchmark", quantisation=None, num_layers=32, hidden_size=HIDDEN, layers=LAYERS, final_norm="pre", dtype="BF16"
)
RUN = "0" * 8
COLUMNS = (
    "dumps", "MB a dump", "dumps", "cp + sync s", "all runs", "ingest s", "all runs", "ingest MB/s", "ingest CPU s", "ratio",
)  # fmt: skip


@dataclass(frozen=True)
class Dump:
    """A dump that waits in the dump folder, and its prompt."""

    request: PrefillRequest
    name: str


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".run/bench"), help="a folder on the store's disk")
    parser.add_argument("--sizes-mb", type=float, nargs="*", default=[1, 10, 75, 150])
    parser.add_argument("--total-mb", type=float, default=1200, help="bytes of each repeat")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rows: list[list[Cell]] = []
    goals: dict[str, str] = {}
    with work_folder(options.work) as work, work_folder(RAM_DISK) as ram:
        for place, source, goal in (("RAM disk to disk", ram, 0.9), ("same file system", work, 1.6)):
            ratios: list[float] = []
            for size in options.sizes_mb:
                count = max(1, round(options.total_mb / size))
                ratio, row = _compare(source / f"dumps-{size}", work, size, count, options.repeats)
                ratios.append(ratio)
                rows.append([place, size, count, *row, ratio])
            goals[f"{place}: rate over that of cp + sync (goal >= {goal})"] = ", ".join(
                f"{ratio:.2f} at {size:g} MB" for size, ratio in zip(options.sizes_mb, ratios, strict=True)
            )
    publish(
        Result(
            name="ingest",
            title="Ingest alone against cp + sync",
            command="python -m benchmarks.ingest",
            columns=COLUMNS,
            rows=rows,
            goals=goals,
            notes=[
                "cp + sync copies and syncs and checks nothing; ingest checks every value, hashes, and writes receipts",
                "cp + sync of the same bytes takes up to four times as long from hour to hour (NOTES.md), and so the ratio moves",
            ],
        )
    )


def _compare(dump_folder: Path, work: Path, size_mb: float, count: int, repeats: int) -> tuple[float, list[Cell]]:
    copying, ingesting, cpu = list[float](), list[float](), list[float]()
    rows = max(1, round(size_mb * 1e6 / ROW_BYTES))
    for repeat in range(repeats):
        dumps = make_dumps(dump_folder, [rows] * count, seed=repeat)
        # Nothing is removed before both sides are done: the other one would pay for that, in the journal and, on ext4, in its
        # search for inodes that were not freed lately.
        os.sync()
        copying.append(copy_and_sync([dump_folder / dump.name for dump in dumps], work / "copies"))
        os.sync()
        started, used = time.monotonic(), time.process_time()
        ingest(dump_folder, dumps, work / "store")
        ingesting.append(time.monotonic() - started)
        cpu.append(time.process_time() - used)
        for folder in (work / "copies", work / "store", dump_folder):
            shutil.rmtree(folder)
    moved = count * rows * ROW_BYTES
    return median(copying) / median(ingesting), [
        median(copying), every(copying), median(ingesting), every(ingesting), moved / median(ingesting) / 1e6, median(cpu),
    ]  # fmt: skip


def make_dumps(folder: Path, lengths: Sequence[int], seed: int) -> list[Dump]:
    """Labelled dumps of random bf16 numbers on the folder's own file system, in the page cache as an engine leaves them. `lengths`:
    their tokens.
    """
    folder.mkdir(mode=0o700)
    draw = np.random.default_rng(seed)
    # One block of random rows, written at shifted offsets: dumps differ, and making them takes no longer than writing.
    block = (draw.standard_normal((max(lengths) + len(lengths), ROW_BYTES // 2), dtype=np.float32).view(np.uint32) >> 16).astype(
        np.uint16
    )
    dumps: list[Dump] = []
    for number, rows in enumerate(lengths):
        ids = draw.integers(16, 1 << 17, rows)
        rid = f"{RID_PREFIX}{RUN}-{number}"
        metadata = {
            "rid": rid,
            "start": "0",
            "end": str(rows),
            "layers": ",".join(map(str, LAYERS)),
            "final_norm": "pre",
            "version": "1",
        }
        states_bytes = rows * ROW_BYTES
        header = {
            "__metadata__": metadata,
            "token_ids": {"dtype": "I64", "shape": [rows], "data_offsets": [0, rows * 8]},
            "hidden_states": {
                "dtype": "BF16", "shape": [rows, len(LAYERS), HIDDEN], "data_offsets": [rows * 8, rows * 8 + states_bytes],
            },
        }  # fmt: skip
        name = name_of(rid, 0, rows)
        with (folder / name).open("wb") as handle:
            handle.write(header_bytes(header, HEADER_BYTES))
            handle.write(ids.astype("<i8").tobytes())
            handle.write(block[number : number + rows].data)
        dumps.append(Dump(PrefillRequest(rid, state_key(ids.tolist()), ids.astype(np.int64)), name))
    return dumps


def ingest(dump_folder: Path, dumps: list[Dump], store_root: Path) -> None:
    """Claims and commits all dumps, as many at once as the extraction loop commits."""
    folder = DumpFolder.open(dump_folder)
    claims = LabelledClaims(folder, IDENTITY, RUN)
    store = Store.open(store_root, IDENTITY)

    def take(dump: Dump) -> Future[Receipt]:
        request = dump.request
        reply = PrefillReply(request.request_id, request.tokens, 0, time.time(), 0.0)
        claimed = claims.claim(request, reply, time.monotonic() + 10)

        def release() -> None:
            claimed.close()
            for name in claimed.entries:
                folder.remove(name)

        return store.commit_soon(claimed, request.state_key, request.token_ids_s, chunk="benchmark", release=release)

    waiting = iter(dumps)

    def take_all(_: int) -> list[Future[Receipt]]:
        return [take(dump) for dump in waiting]

    with ThreadPoolExecutor(COMMIT_THREADS) as pool:
        for taken in pool.map(take_all, range(COMMIT_THREADS)):
            for committed in taken:
                committed.result()
    store.close()
    folder.close()


if __name__ == "__main__":
    main()
