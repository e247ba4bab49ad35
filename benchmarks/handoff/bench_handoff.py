"""How long the hand-off of a large store takes: links for speculators, a conversion for SpecForge beside `cp` + `sync`, in one run.

Makes (and removes) a store of bf16 states of 512 tokens by 4 layers by 4,096 (17 MB each) for the links; for the conversion one of
such states and one of states of 2,048 tokens (67 MB). Both sides begin with nothing in the page cache and take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save_file

from benchmarks.reporting import Cell, Result, median, publish
from benchmarks.world import copy_and_sync, work_folder
from data_contracts.dataset import RECORD_FILE, ROWS_FILE, DatasetRecord
from data_contracts.identity import StoreIdentity, dataset_id, sample_key, state_key_of_bytes
from drafter_data.checkpoints import Checkpoint
from drafter_data.dataset import DATASET_SCHEMA, Dataset
from drafter_data.engines.base import ClaimedDump
from drafter_data.files import xxh3_of
from drafter_data.store.store import Store
from drafter_data.trainers.handoff import hand_off
from drafter_data.trainers.registry import trainer_named

HIDDEN, VOCAB = 4096, 1024
COLUMNS = ("hand-off", "GB", "samples", "wall s", "CPU s", "further MB", "cp + sync s", "rate over that of cp + sync")
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


def make_store(folder: Path, gigabytes: float, tokens: int) -> Made:
    """Commits random states of `tokens` through the store itself; the layers have sizes of their own."""
    model = make_model(folder / "model")
    identity = StoreIdentity(
        weights_digest=Checkpoint.open(model).weights_digest(), num_layers=8, hidden_size=HIDDEN, layers=(2, 4, 5, 8), dtype="BF16"
    )
    store = Store.open(folder / "store", identity)
    rng = np.random.default_rng(1)
    base = rng.standard_normal((tokens, 4, HIDDEN), np.float32) * np.array([1, 2, 3, 9], np.float32)[None, :, None]
    bits_slh = (base.view(np.uint32) >> 16).astype(np.uint16)
    rows = []
    for _ in range(max(20, int(gigabytes * GIGABYTE / bits_slh.nbytes))):
        ids_s = rng.integers(0, VOCAB, tokens).astype(np.int64)
        key = state_key_of_bytes(ids_s.astype("<u4").tobytes())
        bits_slh[0, :, :8] = rng.integers(0x3F00, 0x3F80, (4, 8))
        store.commit(ClaimedDump("dd", bits_slh, "BF16", ids_s, "label", None, ()), key, ids_s)
        mask = (np.arange(tokens) > tokens // 2).astype(np.uint8)
        rows.append((sample_key(key, mask.tobytes()), key, ids_s.astype(np.int32), mask))
    return Made(model, store, write_dataset(folder / "dataset", sorted(rows, key=lambda row: row[0])))


def write_dataset(folder: Path, rows: list[tuple[str, str, np.ndarray, np.ndarray]]) -> Dataset:
    """A finished dataset of these rows, which are of one length."""
    folder.mkdir()
    tokens = len(rows[0][2])
    columns = {
        "sample_key": [row[0] for row in rows], "state_key": [row[1] for row in rows], "run": ["bench"] * len(rows),
        "source_id": [""] * len(rows), "input_ids": [row[2] for row in rows], "loss_mask": [row[3] for row in rows],
        "num_tokens": [tokens] * len(rows), "num_supervised": [int(row[3].sum()) for row in rows],
    }  # fmt: skip
    pq.write_table(pa.table(columns, schema=DATASET_SCHEMA), folder / ROWS_FILE, row_group_size=256)
    record = DatasetRecord(
        dataset_id=dataset_id(row[0] for row in rows), rows=len(rows), distinct_states=len(rows), tokens=tokens * len(rows),
        supervised_tokens=sum(columns["num_supervised"]), longest_tokens=tokens, rows_bytes=(folder / ROWS_FILE).stat().st_size,
        rows_xxh3=xxh3_of(folder / ROWS_FILE), tokenizer="none", tokenizer_hash="", template_hash="", runs=(),
    )  # fmt: skip
    (folder / RECORD_FILE).write_text(record.model_dump_json())
    return Dataset.open(folder)


def used_bytes(folder: Path) -> int:
    """Bytes that a folder takes beyond files that have another name elsewhere."""
    files = [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]
    return sum(path.lstat().st_blocks * 512 for path in files if path.is_symlink() or path.stat().st_nlink == 1)


def time_links(made: Made, out: Path) -> list[Cell]:
    """The speculators hand-off: GB, samples, seconds of wall and CPU, MB of further space."""
    started, used = time.perf_counter(), time.process_time()
    manifest = hand_off(trainer_named("speculators"), made.dataset, made.store, out, model=made.model)
    seconds, cpu = time.perf_counter() - started, time.process_time() - used
    assert manifest.samples == made.dataset.record.rows, manifest.exclusions[:3]
    extra = used_bytes(out) / 1e6
    shutil.rmtree(out)
    return [manifest.bytes / GIGABYTE, manifest.samples, seconds, cpu, extra]


def forget(store: Store) -> None:
    """Drops the state files from the page cache, so that neither side reads from memory what the other has just read."""
    os.sync()
    for receipt in store.receipts():
        descriptor = os.open(store.path_of(receipt.state_key), os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def time_copy(made: Made, out: Path) -> float:
    """Seconds that `cp` of the state files and `sync` take."""
    forget(made.store)
    seconds = copy_and_sync([made.store.path_of(receipt.state_key) for receipt in made.store.receipts()], out)
    shutil.rmtree(out)
    return seconds


def time_conversion(made: Made, out: Path) -> tuple[float, float]:
    """Wall and CPU seconds of the SpecForge hand-off, from the call to the manifest."""
    forget(made.store)
    started, used = time.perf_counter(), time.process_time()
    hand_off(trainer_named("specforge"), made.dataset, made.store, out, model=made.model)
    seconds, cpu = time.perf_counter() - started, time.process_time() - used
    shutil.rmtree(out)
    return seconds, cpu


def compare_conversion(folder: Path, gigabytes: float, tokens: int, repeats: int) -> tuple[float, list[Cell]]:
    """The conversion's rate over the copy's, and a row of the table."""
    made = make_store(folder / "store", gigabytes, tokens)
    time_conversion(made, folder / "warm-up")  # torch and transformers are loaded once a process
    copies, conversions, cpu = list[float](), list[float](), list[float]()
    for n in range(repeats):
        copies.append(time_copy(made, folder / f"copy-{n}"))
        seconds, used = time_conversion(made, folder / f"converted-{n}")
        conversions.append(seconds)
        cpu.append(used)
    stored = sum(receipt.bytes for receipt in made.store.receipts())
    name = f"SpecForge, {stored / len(made.store) / 1e6:.0f} MB states"
    ratio = median(copies) / median(conversions)
    shutil.rmtree(folder)
    row: list[Cell] = [
        name,
        stored / GIGABYTE,
        len(made.store),
        median(conversions),
        median(cpu),
        stored / 1e6,
        median(copies),
        ratio,
    ]
    return ratio, row


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".run/bench"), help="a folder on the store's disk")
    parser.add_argument("--gigabytes", type=float, default=10, help="of the store that is linked")
    parser.add_argument("--converted-gigabytes", type=float, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with work_folder(options.work) as work:
        large = make_store(work / "large", options.gigabytes, 512)
        warm = time_links(large, work / "linked")
        forget(large.store)
        cold = time_links(large, work / "linked-cold")
        shutil.rmtree(work / "large")
        ratios, rows = {}, [["speculators, warm", *warm], ["speculators, nothing in the page cache", *cold]]
        for tokens in (512, 2048):
            ratios[tokens], row = compare_conversion(work / str(tokens), options.converted_gigabytes, tokens, options.repeats)
            rows.append(row)
    publish(
        Result(
            name="handoff",
            title=f"Hand-off of {options.gigabytes:g} GB by links, and conversion beside cp + sync",
            command="python -m benchmarks.handoff.bench_handoff",
            columns=COLUMNS,
            rows=[[*row, *[None] * (len(COLUMNS) - len(row))] for row in rows],
            goals={
                "speculators (goal < 5 s and no further space)": f"{warm[2]:.1f} s, cold {cold[2]:.1f} s, {warm[4]:.1f} MB",
                "SpecForge, rate over that of cp + sync (goal >= 0.5)": ", ".join(
                    f"{ratio:.2f} at {tokens * 4 * HIDDEN * 2 / 1e6:.0f} MB" for tokens, ratio in ratios.items()
                ),
            },
            notes=[
                "cp + sync checks nothing; the conversion checks each state against its receipt, norms, hashes, writes and syncs",
                "medians of alternating turns, each of which begins with nothing in the page cache",
            ],
        )
    )


if __name__ == "__main__":
    main()
