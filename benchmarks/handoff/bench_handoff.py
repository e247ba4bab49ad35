"""How long the hand-off of a large store takes: links for speculators, a conversion for SpecForge beside a plain copy, in one run.

Usage: python -m benchmarks.handoff.bench_handoff FOLDER [GB] [CONVERTED_GB]
Makes (and removes) a store of GB (default 10) in FOLDER, and one of CONVERTED_GB (default 1.5) that is copied and converted.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save_file

from data_contracts.dataset import RECORD_FILE, ROWS_FILE, DatasetRecord
from data_contracts.identity import StoreIdentity, dataset_id, sample_key, state_key_of_bytes
from drafter_data.checkpoints import Checkpoint
from drafter_data.dataset import DATASET_SCHEMA, Dataset
from drafter_data.engines.base import ClaimedDump
from drafter_data.files import xxh3_of
from drafter_data.store.store import Store
from drafter_data.trainers.handoff import hand_off
from drafter_data.trainers.registry import trainer_named

HIDDEN, TOKENS, VOCAB = 4096, 512, 1024
STATE_BYTES = TOKENS * 4 * HIDDEN * 2
GIGABYTE = 1_000_000_000


@dataclass(frozen=True)
class Made:
    """A store of about the size asked for, its dataset and its model."""

    model: Path
    store: Store
    dataset: Dataset


def make_model(folder: Path) -> Path:
    """The parts of a checkpoint that a hand-off reads, for a Llama of 8 layers."""
    folder.mkdir(parents=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": 8}
    config |= {"vocab_size": VOCAB, "rms_norm_eps": 1e-5, "intermediate_size": 256, "num_attention_heads": 32}
    config |= {"num_key_value_heads": 8, "torch_dtype": "bfloat16", "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    tensors = {"model.norm.weight": rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32)}
    tensors |= {name: rng.standard_normal((VOCAB, HIDDEN), np.float32) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file(tensors, folder / "model.safetensors")
    return folder


def make_store(folder: Path, gigabytes: float) -> Made:
    """Commits random states through the store itself; the layers have sizes of their own."""
    model = make_model(folder / "model")
    identity = StoreIdentity(
        weights_digest=Checkpoint.open(model).weights_digest(), num_layers=8, hidden_size=HIDDEN, layers=(2, 4, 5, 8), dtype="BF16"
    )
    store = Store.open(folder / "store", identity)
    rng = np.random.default_rng(1)
    base = rng.standard_normal((TOKENS, 4, HIDDEN), np.float32) * np.array([1, 2, 3, 9], np.float32)[None, :, None]
    bits_slh = (base.view(np.uint32) >> 16).astype(np.uint16)
    rows = []
    for _ in range(max(20, int(gigabytes * GIGABYTE / STATE_BYTES))):
        ids_s = rng.integers(0, VOCAB, TOKENS).astype(np.int64)
        key = state_key_of_bytes(ids_s.astype("<u4").tobytes())
        bits_slh[0, :, :8] = rng.integers(0x3F00, 0x3F80, (4, 8))
        store.commit(ClaimedDump("dd", bits_slh, "BF16", ids_s, "label", None, ()), key, ids_s)
        mask = (np.arange(TOKENS) > TOKENS // 2).astype(np.uint8)
        rows.append((sample_key(key, mask.tobytes()), key, ids_s.astype(np.int32), mask))
    return Made(model, store, write_dataset(folder / "dataset", sorted(rows, key=lambda row: row[0])))


def write_dataset(folder: Path, rows: list[tuple[str, str, np.ndarray, np.ndarray]]) -> Dataset:
    """A finished dataset of these rows."""
    folder.mkdir()
    columns = {
        "sample_key": [row[0] for row in rows], "state_key": [row[1] for row in rows], "run": ["bench"] * len(rows),
        "source_id": [""] * len(rows), "input_ids": [row[2] for row in rows], "loss_mask": [row[3] for row in rows],
        "num_tokens": [TOKENS] * len(rows), "num_supervised": [int(row[3].sum()) for row in rows],
    }  # fmt: skip
    pq.write_table(pa.table(columns, schema=DATASET_SCHEMA), folder / ROWS_FILE, row_group_size=256)
    record = DatasetRecord(
        dataset_id=dataset_id(row[0] for row in rows), rows=len(rows), distinct_states=len(rows), tokens=TOKENS * len(rows),
        supervised_tokens=sum(columns["num_supervised"]), longest_tokens=TOKENS, rows_bytes=(folder / ROWS_FILE).stat().st_size,
        rows_xxh3=xxh3_of(folder / ROWS_FILE), tokenizer="none", tokenizer_hash="", template_hash="", runs=(),
    )  # fmt: skip
    (folder / RECORD_FILE).write_text(record.model_dump_json())
    return Dataset.open(folder)


def used_bytes(folder: Path) -> int:
    """Bytes that a folder takes beyond files that have another name elsewhere."""
    files = [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]
    return sum(path.lstat().st_blocks * 512 for path in files if path.is_symlink() or path.stat().st_nlink == 1)


def time_links(made: Made, out: Path) -> dict[str, float]:
    """The speculators hand-off."""
    started = time.perf_counter()
    manifest = hand_off(trainer_named("speculators"), made.dataset, made.store, out, model=made.model)
    seconds = time.perf_counter() - started
    assert manifest.samples == made.dataset.record.rows, manifest.exclusions[:3]
    return {
        "store_gb": manifest.bytes / GIGABYTE,
        "samples": manifest.samples,
        "seconds": seconds,
        "extra_mb": used_bytes(out) / 1e6,
    }


def forget(store: Store) -> None:
    """Drops the state files from the page cache, so that neither side reads from memory what the other has just read."""
    os.sync()
    for receipt in store.receipts():
        descriptor = os.open(store.path_of(receipt.state_key), os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def time_copy(store: Store, out: Path) -> float:
    """Bytes a second of a plain copy of the state files, each synced, as a conversion's are."""
    forget(store)
    out.mkdir()
    started, copied = time.perf_counter(), 0
    for receipt in store.receipts():
        target = out / receipt.state_key
        shutil.copyfile(store.path_of(receipt.state_key), target)
        with target.open("rb") as handle:
            os.fsync(handle.fileno())
        copied += receipt.bytes
    return copied / (time.perf_counter() - started)


def time_conversion(made: Made, out: Path) -> float:
    """Bytes of states a second of the SpecForge hand-off, from the call to the manifest."""
    forget(made.store)
    started = time.perf_counter()
    hand_off(trainer_named("specforge"), made.dataset, made.store, out, model=made.model)
    return made.dataset.record.rows * STATE_BYTES / (time.perf_counter() - started)


def main() -> None:
    """Prints the figures as JSON and the two bounds that must hold."""
    folder = Path(sys.argv[1]) / f"bench-handoff-{os.getpid()}"
    gigabytes, converted = (float(sys.argv[n]) if len(sys.argv) > n else default for n, default in ((2, 10.0), (3, 1.5)))
    try:
        made = make_store(folder / "large", gigabytes)
        links = time_links(made, folder / "linked")
        small = make_store(folder / "small", converted)
        time_conversion(small, folder / "warm-up")  # torch and transformers are loaded once a process
        shutil.rmtree(folder / "warm-up")
        copies, conversions = [], []
        for n in range(3):
            copies.append(time_copy(small.store, folder / f"copy-{n}"))
            conversions.append(time_conversion(small, folder / f"converted-{n}"))
            shutil.rmtree(folder / f"copy-{n}")
            shutil.rmtree(folder / f"converted-{n}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ratio = float(np.median(conversions) / np.median(copies))
    figures = {"speculators": links, "copy_mb_per_second": [c / 1e6 for c in copies]}
    figures |= {"specforge_mb_per_second": [c / 1e6 for c in conversions], "specforge_share_of_copy": ratio}
    print(json.dumps(figures, indent=2, default=float))
    print(f"links under 5 s: {links['seconds'] < 5}; conversion at half the copy's speed or more: {ratio >= 0.5}")


if __name__ == "__main__":
    main()
