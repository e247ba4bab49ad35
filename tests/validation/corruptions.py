"""Every way in which a state can be wrong, made on a copy of a good store.

Half of the kinds are in the file before its receipt's checksum is taken, so that only content can tell; the others come later.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from data_contracts.receipt import Receipt
from drafter_data.embedded.llama import Llama
from drafter_data.safetensors_file import TensorFile, state_header
from drafter_data.store.receipts import ReceiptLog
from drafter_data.store.store import Store

LAYERS = (2, 4, 5, 8)
VOCABULARY = 1024


@dataclass
class Victim:
    """A good sample: its receipt, its states [S, L, H] float32 and ids, the model that made them, and a generator of its own."""

    path: Path
    receipt: Receipt
    states: np.ndarray
    ids: np.ndarray
    model: Llama
    rng: np.random.Generator

    def place(self) -> tuple[int, int, int]:
        tokens, layers, hidden = self.states.shape
        return tuple(int(self.rng.integers(n)) for n in (tokens, layers, hidden))  # type: ignore[return-value]


@dataclass(frozen=True)
class Corruption:
    """`reasons` are the right names; `least_tokens` is the length from which content can tell."""

    name: str
    reasons: tuple[str, ...]
    early: bool
    apply: Callable[[Victim], np.ndarray | bytes | None]
    least_tokens: int = 0


def _set(value: float) -> Callable[[Victim], np.ndarray]:
    def apply(victim: Victim) -> np.ndarray:
        states = victim.states.copy()
        states[victim.place()] = value
        return states

    return apply


def _zero_row(victim: Victim) -> np.ndarray:
    states = victim.states.copy()
    row, layer, _ = victim.place()
    states[row, layer] = 0
    return states


def _zero_layer(victim: Victim) -> np.ndarray:
    states = victim.states.copy()
    states[:, victim.place()[1]] = 0
    return states


def _duplicate_layer(victim: Victim) -> np.ndarray:
    states = victim.states.copy()
    a, b = victim.rng.choice(len(LAYERS), 2, replace=False)
    states[:, a] = states[:, b]
    return states


def _swapped_layers(victim: Victim) -> np.ndarray:
    order = np.arange(len(LAYERS))
    while (order == np.arange(len(LAYERS))).all():
        order = victim.rng.permutation(len(LAYERS))
    return victim.states[:, order]


def _post_norm(victim: Victim) -> np.ndarray:
    states = victim.states.copy()
    states[:, -1] = victim.model.final_norm(states[:, -1])
    return states


def _scaled_layer(victim: Victim) -> np.ndarray:
    states = victim.states.copy()
    states[:, victim.place()[1]] *= victim.rng.choice([0.5, 0.8, 1.25, 2.0])
    return states


def _layers_off_by_one(victim: Victim) -> np.ndarray:
    return victim.model.forward(victim.ids, [3, 5, 6, 8])


def _transposed(victim: Victim) -> np.ndarray:
    axes = [(1, 0, 2), (0, 2, 1)][int(victim.rng.integers(2))]
    return np.ascontiguousarray(victim.states.transpose(axes)).reshape(victim.states.shape)


def _another_prompt(victim: Victim) -> np.ndarray:
    return victim.model.forward(victim.rng.integers(5, VOCABULARY, len(victim.ids)), LAYERS)


def _rows_moved(victim: Victim) -> np.ndarray:
    return np.roll(victim.states, int(victim.rng.choice([-1, 1])), axis=0)


def _rows_short(victim: Victim) -> bytes:
    return state_bytes(victim.states[:-1], victim.ids)


def _half_precision(victim: Victim) -> bytes:
    return state_bytes(victim.states.astype(np.float16), victim.ids)


def _layer_missing(victim: Victim) -> bytes:
    return state_bytes(victim.states[:, :3], victim.ids)


def _other_ids(victim: Victim) -> bytes:
    ids = victim.ids.copy()
    ids[victim.place()[0]] ^= 1
    return state_bytes(victim.states, ids)


def _flipped_bit(victim: Victim) -> bytes:
    data = bytearray(victim.path.read_bytes())
    row, layer, hidden = victim.place()
    at = len(data) - victim.states.nbytes + 4 * int(np.ravel_multi_index((row, layer, hidden), victim.states.shape))
    data[at] ^= 1  # the lowest bit of a little-endian float's mantissa
    return bytes(data)


def _header_byte(victim: Victim) -> bytes:
    data = bytearray(victim.path.read_bytes())
    data[8 + int(victim.rng.integers(2, 40))] ^= 0x10
    return bytes(data)


def _cut(victim: Victim) -> bytes:
    data = victim.path.read_bytes()
    return data[: -int(victim.rng.integers(1, len(data) // 2))]


def _trailing(victim: Victim) -> bytes:
    return victim.path.read_bytes() + bytes(int(victim.rng.integers(1, 64)))


def _zeroed_pages(victim: Victim) -> bytes:
    data = bytearray(victim.path.read_bytes())
    start = int(victim.rng.integers(len(data) // 2, len(data) - 4096))
    data[start : start + 4096] = bytes(4096)
    return bytes(data)


def _all_zeros(victim: Victim) -> bytes:
    return bytes(victim.receipt.bytes)


def _late_ids(victim: Victim) -> bytes:
    data = bytearray(victim.path.read_bytes())
    at = len(data) - victim.states.nbytes - 8 * int(victim.rng.integers(1, len(victim.ids) + 1))
    data[at] ^= 1
    return bytes(data)


def _swapped_values(victim: Victim) -> bytes:
    """Two blocks change places: every value is a good one."""
    data = bytearray(victim.path.read_bytes())
    a, b = len(data) - victim.states.nbytes, len(data) - 512
    data[a : a + 512], data[b : b + 512] = data[b : b + 512], data[a : a + 512]
    return bytes(data)


def _gone(_: Victim) -> None:
    return None


CORRUPTIONS = (
    Corruption("NaN", ("not-finite",), True, _set(np.nan)),
    Corruption("infinity", ("not-finite",), True, _set(-np.inf)),
    Corruption("row of zeros", ("zero-rows",), True, _zero_row),
    Corruption("layer of zeros", ("zero-rows",), True, _zero_layer),
    Corruption("duplicate layer", ("layers-equal",), True, _duplicate_layer),
    Corruption("layers swapped", ("layers-swapped",), True, _swapped_layers),
    Corruption("final state past the norm", ("final-norm",), True, _post_norm, 48),
    Corruption("layer scaled", ("layer-scale",), True, _scaled_layer, 48),
    Corruption("layer ids off by one", ("layers-unlike",), True, _layers_off_by_one, 90),
    Corruption("transposed layout", ("layout",), True, _transposed),
    Corruption("states of another prompt", ("another-prompt",), True, _another_prompt),
    Corruption("rows moved by one", ("rows-shifted",), True, _rows_moved, 32),
    Corruption("a row short", ("row-count",), True, _rows_short),
    Corruption("half precision", ("dtype",), True, _half_precision),
    Corruption("a layer missing", ("shape",), True, _layer_missing),
    Corruption("other token ids", ("token-ids",), True, _other_ids),
    Corruption("flipped mantissa bit", ("checksum",), False, _flipped_bit),
    Corruption("header byte", ("header", "shape", "dtype", "row-count", "checksum"), False, _header_byte),
    Corruption("cut file", ("file-size",), False, _cut),
    Corruption("trailing bytes", ("file-size",), False, _trailing),
    Corruption("zeroed pages", ("zero-rows",), False, _zeroed_pages),
    Corruption("right size, all zeros", ("header",), False, _all_zeros),
    Corruption("token id changed later", ("token-ids",), False, _late_ids),
    Corruption("blocks exchanged", ("checksum",), False, _swapped_values),
    Corruption("file gone", ("file-missing",), False, _gone),
)


def state_bytes(states: np.ndarray, ids: np.ndarray) -> bytes:
    """A state file of whatever states and ids are given."""
    dtype = {np.dtype("f4"): "F32", np.dtype("f2"): "F16"}[states.dtype]
    ids_part = ids.astype("<i8").tobytes()
    if len(states) == len(ids):
        return state_header(states.shape, dtype) + ids_part + np.ascontiguousarray(states).tobytes()
    header = state_header(states.shape, dtype)
    text = header[8:].replace(f'"shape":[{len(states)}],"data_offsets":[0,{8 * len(states)}]'.encode(),
                              f'"shape":[{len(ids)}],"data_offsets":[0,{8 * len(ids)}]'.encode())  # fmt: skip
    end = 8 * len(ids) + states.nbytes
    text = text.replace(f"[{8 * len(states)},{8 * len(states) + states.nbytes}]".encode(), f"[{8 * len(ids)},{end}]".encode())
    return len(text).to_bytes(8, "little") + text + ids_part + states.tobytes()


def copy_store(store: Store, root: Path, keys: list[str]) -> Store:
    """A copy whose state files are hard links, of some of its states."""
    copy = Store.open(root, store.identity)
    log = ReceiptLog(root / "receipts", "copy")
    for key in keys:
        receipt = store.find(key)
        assert receipt is not None
        target = copy.path_of(key)
        target.parent.mkdir(exist_ok=True)
        os.link(store.path_of(key), target)
        with (root / "receipts" / "copied.copy.jsonl").open("a") as handle:
            handle.write(receipt.model_dump_json() + "\n")
    log.close()
    copy.refresh()
    return copy


def corrupt(store: Store, key: str, corruption: Corruption, model: Llama, seed: int) -> None:
    """Makes one state of a copied store wrong; an early corruption gets a receipt with the wrong file's checksum."""
    receipt = store.find(key)
    assert receipt is not None
    path = store.path_of(key)
    with TensorFile.open(path) as file:
        states, ids = file.array("hidden_states").copy(), file.array("token_ids").copy()
    made = corruption.apply(Victim(path, receipt, states, ids, model, np.random.default_rng(seed)))
    path.unlink()
    if made is None:
        return
    data = state_bytes(np.ascontiguousarray(made), ids) if isinstance(made, np.ndarray) else made
    path.write_bytes(data)
    if corruption.early:
        forged = receipt.model_copy(update={"bytes": len(data), "xxh3": xxhash.xxh3_128(data).hexdigest()})
        with (store.root / "receipts" / "zz.forged.jsonl").open("a") as handle:
            handle.write(forged.model_dump_json() + "\n")


def remove(store: Store) -> None:
    """Closes and deletes a copied store."""
    store.close()
    shutil.rmtree(store.root)
