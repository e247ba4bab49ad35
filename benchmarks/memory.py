"""Memory of the client at a million samples, with an engine that answers at once: planned, then resumed with nearly all there.

Each phase runs in a process of its own, whose peak RSS counts: preflight and plan; a resumed session that extracts what is left
with the most requests in flight that can be set. The resume's receipts are the benchmark's; no state files belong to them. Last, a
whole run with dumps of the field's size, from the embedded engine's timed mode.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.reporting import Cell, Result, peak_rss_mb, publish
from benchmarks.world import (
    FIELD_MEAN_TOKENS,
    RAM_DISK,
    field_lengths,
    make_dataset,
    prompts_of,
    run_module,
    stub_checkpoint,
    timed_engine,
    work_folder,
)
from data_contracts.dataset import RECORD_FILE, ROWS_FILE, DatasetRecord
from data_contracts.identity import Provenance, StoreIdentity, dataset_id, sample_key, state_key_of_bytes
from data_contracts.parameters import EngineParameters, ExtractionParameters
from data_contracts.receipt import Receipt
from drafter_data.costs import CostModel
from drafter_data.dataset import DATASET_SCHEMA, Dataset
from drafter_data.engines.base import ClaimedDump, EngineInfo, PrefillReply, PrefillRequest
from drafter_data.extraction.campaign import extract_all, pending_chunks
from drafter_data.extraction.session import ExtractionSession, SessionSettings
from drafter_data.files import xxh3_of
from drafter_data.planning import make_plan
from drafter_data.preflight import run_preflight
from drafter_data.store.store import Store

TOKENS, HIDDEN, LAYERS = 8, 16, (2, 4, 5, 8)
LEFT = 2000
FIELD_HIDDEN, FIELD_DUMPS = 7168, 40
GROUP_ROWS = 5000


class InstantEngine:
    """Answers at once; a token's states are random numbers of its own."""

    def __init__(self, model: Path) -> None:
        identity = StoreIdentity(
            weights_digest="benchmark",
            quantisation=None,
            num_layers=8,
            hidden_size=HIDDEN,
            layers=LAYERS,
            final_norm="pre",
            dtype="F32",
        )
        provenance = Provenance(
            engine="instant", engine_version="", model=str(model), host="", tensor_parallel=1, flags={}, code_version=""
        )
        self._info = EngineInfo(
            kind="instant", url="", identity=identity, provenance=provenance, max_prompt_tokens=4096, in_flight_limit=512,
            lengths_must_differ=False, labelled=True, fingerprint="0" * 16,
        )  # fmt: skip
        self._rows_vlh = np.random.default_rng(0).standard_normal((1024, len(LAYERS), HIDDEN), dtype=np.float32)
        self._count = 0

    def describe(self) -> EngineInfo:
        return self._info

    def new_request_id(self) -> str:
        self._count += 1
        return f"r-{self._count}"

    def send(self, request: PrefillRequest) -> PrefillReply:
        return PrefillReply(request.request_id, request.tokens, 0, time.time(), 0.0)

    def claim(self, request: PrefillRequest, reply: PrefillReply, deadline: float) -> ClaimedDump:
        del reply, deadline
        states_slh = self._rows_vlh[request.token_ids_s]
        return ClaimedDump(request.request_id, states_slh, "F32", request.token_ids_s, "label", None, ())

    def release(self, dump: ClaimedDump) -> None:
        dump.close()

    def abandon(self, request: PrefillRequest) -> None:
        del request

    def sweep(self) -> int:
        return 0

    def free_bytes(self) -> int:
        return 1 << 34

    def alive(self) -> bool:
        return True

    def interrupt(self) -> None:
        return

    def close(self) -> None:
        return


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".run/bench"), help="a folder on the store's disk")
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--phase", choices=["plan", "resume"], help="used by the benchmark itself")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.phase:
        phase = plan_phase if options.phase == "plan" else resume_phase
        result = phase(options.folder)
        sys.stdout.write(json.dumps({**result, "peak_rss_mb": peak_rss_mb()}))
        return
    with work_folder(options.work) as work:
        planned, resumed = plan_and_resume(work, options.samples)
        _publish(options.samples, planned, resumed, large_dumps(work))


def plan_and_resume(work: Path, samples: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both phases, each in a process of its own: what they took and their peak RSS in MB."""
    stub_checkpoint(work / "model", hidden_size=HIDDEN, num_layers=8)
    write_large_dataset(work / "dataset", samples)
    planned = run_module("benchmarks.memory", "--phase", "plan", "--folder", str(work))
    fake_receipts(work / "store", Dataset.open(work / "dataset"), samples - LEFT)
    return planned, run_module("benchmarks.memory", "--phase", "resume", "--folder", str(work))


def large_dumps(work: Path) -> dict[str, Any]:
    """A run over dumps of 135 MB on average, as many in flight as the RAM disk lets."""
    dataset = make_dataset(work / "large", prompts_of(field_lengths(FIELD_DUMPS)))
    with work_folder(RAM_DISK) as ram, timed_engine(work, ram / "dumps", hidden_size=FIELD_HIDDEN, num_layers=61) as engine:
        given = ["--engine", engine.parameters().model_dump_json(), "--in-flight", "64"]
        return run_module("benchmarks.pipeline", str(dataset), str(work / "large-store"), *given)


def _publish(samples: int, planned: dict[str, Any], resumed: dict[str, Any], large: dict[str, Any]) -> None:
    each = FIELD_MEAN_TOKENS * 4 * FIELD_HIDDEN * 2 / 1e6
    rows: list[list[Cell]] = [
        [
            "preflight and plan",
            f"preflight {planned['preflight_seconds']:.1f} s, plan {planned['plan_seconds']:.1f} s",
            planned["peak_rss_mb"],
        ],
        [
            f"resume with {LEFT:,} left, 512 in flight",
            f"opened in {resumed['open_seconds']:.1f} s, extracted {resumed['extracted']:,} in {resumed['extract_seconds']:.1f} s",
            resumed["peak_rss_mb"],
        ],
        [
            f"{FIELD_DUMPS} dumps of {each:.0f} MB, up to 64 in flight",
            f"extracted in {large['seconds']:.1f} s",
            large["peak_rss_mb"],
        ],
    ]
    peak = max(float(phase["peak_rss_mb"]) for phase in (planned, resumed, large))
    publish(
        Result(
            name="memory",
            title=f"Memory of the client at {samples:,} samples, with an engine that answers at once",
            command="python -m benchmarks.memory",
            columns=("phase", "took", "peak RSS MB"),
            rows=rows,
            goals={
                "peak RSS (goal < 500 MB)": f"{peak:.0f} MB",
                "planning (goal < 60 s)": f"{planned['plan_seconds']:.1f} s",
            },
        )
    )


def plan_phase(folder: Path) -> dict[str, Any]:
    """Preflight and a new plan."""
    dataset, engine = Dataset.open(folder / "dataset"), InstantEngine(folder / "model")
    started = time.monotonic()
    run_preflight(engine, dataset, folder / "store", ExtractionParameters())
    checked = time.monotonic()
    store = Store.open(folder / "store", engine.describe().identity)
    plan = make_plan(dataset, store, CostModel(), chunk_samples=200, max_prompt_tokens=4096)
    return {"preflight_seconds": checked - started, "plan_seconds": time.monotonic() - checked, "chunks": len(plan.chunks)}


def resume_phase(folder: Path) -> dict[str, Any]:
    """A session over a nearly full store brings the rest."""
    started = time.monotonic()
    settings = SessionSettings(
        dataset=folder / "dataset",
        store=folder / "store",
        engine=EngineParameters(),
        extraction=ExtractionParameters(in_flight=512),
        in_flight=512,
        tolerance=1e-5,
    )
    session = ExtractionSession(settings, InstantEngine(folder / "model"))
    (folder / "store" / "in-flight").write_text("512")
    opened, before = time.monotonic(), len(session.store)
    chunks = pending_chunks(session.plan, session.store)
    extract_all(session, chunks)
    session.snapshot()
    extracted, ended = len(session.store) - before, time.monotonic()
    session.close()
    return {"open_seconds": opened - started, "extract_seconds": ended - opened, "extracted": extracted}


def write_large_dataset(folder: Path, count: int) -> None:
    """A finished dataset of `count` prompts of 8 distinct-by-row tokens, in the contract's form."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    ids_rs = draw.integers(16, 1024, (count, TOKENS), dtype=np.int32)
    ids_rs[:, 0], ids_rs[:, 1] = 16 + np.arange(count) // 1000 % 1000, 16 + np.arange(count) % 1000
    mask = bytes([0] * 4 + [1] * 4)
    state_keys = [state_key_of_bytes(row.tobytes()) for row in ids_rs.astype("<u4")]
    sample_keys = [sample_key(key, mask) for key in state_keys]
    order = np.argsort(np.array(sample_keys))
    with pq.ParquetWriter(folder / ROWS_FILE, DATASET_SCHEMA) as writer:
        for start in range(0, count, GROUP_ROWS):
            rows = order[start : start + GROUP_ROWS]
            writer.write_table(_group(rows, ids_rs, mask, sample_keys, state_keys))
    record = DatasetRecord(
        dataset_id=dataset_id(sample_keys[row] for row in order), rows=count, distinct_states=count, tokens=count * TOKENS,
        supervised_tokens=count * TOKENS // 2, longest_tokens=TOKENS, rows_bytes=(folder / ROWS_FILE).stat().st_size,
        rows_xxh3=xxh3_of(folder / ROWS_FILE), tokenizer="none", tokenizer_hash="", template_hash="", runs=(),
    )  # fmt: skip
    (folder / RECORD_FILE).write_text(record.model_dump_json())


def _group(rows: Any, ids_rs: Any, mask: bytes, sample_keys: list[str], state_keys: list[str]) -> pa.Table:
    count = len(rows)
    values = {
        "sample_key": [sample_keys[row] for row in rows],
        "state_key": [state_keys[row] for row in rows],
        "run": ["benchmark"] * count,
        "source_id": [str(row) for row in rows],
        "input_ids": list(ids_rs[rows]),
        "loss_mask": [np.frombuffer(mask, np.uint8)] * count,
        "num_tokens": np.full(count, TOKENS, np.int32),
        "num_supervised": np.full(count, TOKENS // 2, np.int32),
    }
    return pa.table(values, schema=DATASET_SCHEMA)


def fake_receipts(store_root: Path, dataset: Dataset, count: int) -> None:
    """Receipts of the first `count` rows, 200 a file as chunks leave them in the thousands, here 20,000 a file."""
    with pq.ParquetFile(dataset.rows_path) as file:
        written = 0
        for number, batch in enumerate(file.iter_batches(20_000, columns=["state_key"])):
            keys = batch.column("state_key").to_pylist()[: count - written]
            chunk = hashlib.blake2b(str(number).encode(), digest_size=10).hexdigest()
            lines = [_receipt(key, chunk) for key in keys]
            (store_root / "receipts" / f"{chunk}.benchmark.jsonl").write_text("".join(lines))
            written += len(keys)


def _receipt(key: str, chunk: str) -> str:
    receipt = Receipt(
        state_key=key,
        tokens=TOKENS,
        shape=(TOKENS, len(LAYERS), HIDDEN),
        dtype="F32",
        bytes=2264,
        xxh3="0" * 32,
        proof="label",
        chunk=chunk,
    )
    return receipt.model_dump_json() + "\n"


if __name__ == "__main__":
    main()
