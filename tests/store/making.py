"""Small stores and datasets for tests, made through the real writers."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from data_contracts.dataset import RECORD_FILE, ROWS_FILE, DatasetRecord
from data_contracts.dump import HEADER_BYTES, name_of
from data_contracts.identity import StateDtype, StoreIdentity, dataset_id, sample_key, state_key_of_bytes
from data_contracts.receipt import Receipt
from drafter_data.dataset import DATASET_SCHEMA, Dataset
from drafter_data.embedded.dumps import header_bytes
from drafter_data.engines.base import ClaimedDump
from drafter_data.files import xxh3_of
from drafter_data.safetensors_file import NUMPY_DTYPES, state_header
from drafter_data.store.store import Store

LAYERS = (2, 4, 5, 8)


def identity_of(hidden: int = 32, dtype: StateDtype = "F32", **changes: object) -> StoreIdentity:
    """An identity of a model of eight layers."""
    return StoreIdentity(weights_digest="w", num_layers=8, hidden_size=hidden, layers=LAYERS, dtype=dtype).model_copy(
        update=changes
    )


def ids_of(tokens: int, seed: int, vocabulary: int = 1024) -> NDArray[np.int64]:
    """Token ids that differ from seed to seed."""
    return np.random.default_rng([seed, tokens]).integers(0, vocabulary, tokens).astype(np.int64)


def states_of(ids_s: NDArray[np.int64], hidden: int = 32, dtype: StateDtype = "F32") -> NDArray[np.generic]:
    """States that look like a model's: each layer has its own scale, direction and a few large channels."""
    layer_rng, rng = np.random.default_rng(7), np.random.default_rng(ids_s.view(np.uint8)[:64].tolist())
    scale_l = np.array([0.4, 1.1, 1.9, 6.0])
    profile_lh = np.exp(layer_rng.normal(0, 0.8, (len(LAYERS), hidden)))
    offset_lh = layer_rng.normal(0, 0.7, (len(LAYERS), hidden))
    noise_slh = rng.normal(0, 1, (len(ids_s), len(LAYERS), hidden))
    token_s = np.exp(rng.normal(0, 0.15, len(ids_s)))
    states = ((noise_slh + offset_lh) * profile_lh * scale_l[:, None] * token_s[:, None, None]).astype(np.float32)
    if dtype == "BF16":
        return (states.view(np.uint32) >> 16).astype(np.uint16)
    return states.astype(NUMPY_DTYPES[dtype])


def dump_of(ids_s: NDArray[np.int64], hidden: int = 32, dtype: StateDtype = "F32", **changes: object) -> ClaimedDump:
    """A claimed dump in memory."""
    fields = {
        "request_id": "dd-test",
        "states_slh": states_of(ids_s, hidden, dtype),
        "dtype": dtype,
        "token_ids_s": ids_s,
        "proof": "label",
        "proof_error": None,
        "entries": (),
    }
    return ClaimedDump(**(fields | changes))  # type: ignore[arg-type]


def whole_file_dump(folder: Path, ids_s: NDArray[np.int64], hidden: int = 32) -> ClaimedDump:
    """A claimed dump that lies in `folder` as one file in the state form, open for writing."""
    states = states_of(ids_s, hidden)
    path = folder / "dump.safetensors"
    header = state_header(states.shape, "F32", 1024)
    path.write_bytes(header + ids_s.tobytes() + states.tobytes())
    descriptor = os.open(path, os.O_RDWR)
    return dump_of(ids_s, hidden, states_slh=states, whole_file=(descriptor, path.name, 1024), leave=path.unlink)


def labelled_dump(folder: Path, ids_s: NDArray[np.int64], request_id: str, hidden: int = 32) -> Path:
    """A dump of a whole prompt with its label, as the capture hook leaves it."""
    states = states_of(ids_s, hidden)
    label = {"rid": request_id, "start": "0", "end": str(len(ids_s)), "layers": ",".join(map(str, LAYERS)), "final_norm": "pre"}
    tensors = {
        "token_ids": {"dtype": "I64", "shape": [len(ids_s)], "data_offsets": [0, ids_s.nbytes]},
        "hidden_states": {"dtype": "F32", "shape": states.shape, "data_offsets": [ids_s.nbytes, ids_s.nbytes + states.nbytes]},
    }
    path = folder / name_of(request_id, 0, len(ids_s))
    path.write_bytes(header_bytes({"__metadata__": label, **tensors}, HEADER_BYTES) + ids_s.tobytes() + states.tobytes())
    return path


def key_of(ids_s: NDArray[np.int64]) -> str:
    """The state key of ids."""
    return state_key_of_bytes(ids_s.astype("<u4").tobytes())


def commit(store: Store, ids_s: NDArray[np.int64], **options: object) -> Receipt:
    """Commits the states of ids."""
    dump = dump_of(ids_s, store.identity.hidden_size, store.identity.dtype)
    return store.commit(dump, key_of(ids_s), ids_s, **options)  # type: ignore[arg-type]


def write_dataset(folder: Path, rows: list[tuple[NDArray[np.int64], NDArray[np.uint8]]], group_rows: int = 64) -> Dataset:
    """A finished dataset of (ids, mask) rows."""
    keyed = []
    for ids_s, mask_s in rows:
        state = key_of(ids_s)
        keyed.append((sample_key(state, mask_s.tobytes()), state, ids_s, mask_s))
    keyed.sort(key=lambda row: row[0])
    folder.mkdir(parents=True)
    table = pa.table(
        {
            "sample_key": [row[0] for row in keyed],
            "state_key": [row[1] for row in keyed],
            "run": ["a"] * len(keyed),
            "source_id": [str(k) for k in range(len(keyed))],
            "input_ids": [row[2].astype(np.int32) for row in keyed],
            "loss_mask": [row[3] for row in keyed],
            "num_tokens": [len(row[2]) for row in keyed],
            "num_supervised": [int(row[3].sum()) for row in keyed],
        },
        schema=DATASET_SCHEMA,
    )
    pq.write_table(table, folder / ROWS_FILE, row_group_size=group_rows)
    lengths = [len(row[2]) for row in keyed]
    record = DatasetRecord(
        dataset_id=dataset_id(row[0] for row in keyed),
        rows=len(keyed),
        distinct_states=len({row[1] for row in keyed}),
        tokens=sum(lengths),
        supervised_tokens=sum(int(row[3].sum()) for row in keyed),
        longest_tokens=max(lengths),
        rows_bytes=(folder / ROWS_FILE).stat().st_size,
        rows_xxh3=xxh3_of(folder / ROWS_FILE),
        tokenizer="builtin",
        tokenizer_hash="t",
        template_hash="m",
        runs=(),
    )
    (folder / RECORD_FILE).write_text(record.model_dump_json())
    return Dataset.open(folder)


def small_dataset(folder: Path, samples: int, seed: int = 0, longest: int = 60) -> Dataset:
    """A dataset of rows of 4 to `longest` tokens whose last half is supervised."""
    rng = np.random.default_rng(seed)
    rows = []
    for k in range(samples):
        ids_s = ids_of(int(rng.integers(4, longest + 1)), seed * 1_000_000 + k)
        rows.append((ids_s, (np.arange(len(ids_s)) >= len(ids_s) // 2).astype(np.uint8)))
    return write_dataset(folder, rows)
