"""Content checks of states, before and after they are stored. One pass over the bytes, in blocks that stay in the cache.

Tensor legend: S tokens, L stored layers, H hidden size; rows are [L*H] a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from drafter_data.errors import DumpRejected
from drafter_data.foreign_file import RowsOnDisk
from drafter_data.safetensors_file import as_float32

BLOCK_BYTES = 1 << 20
_HEAD = 8
_BITS: dict[str, tuple[Any, Any, int]] = {
    "F32": (np.uint32, np.int32, 0x7F800000),
    "F16": (np.uint16, np.int16, 0x7C00),
    "BF16": (np.uint16, np.int16, 0x7F80),
}
"""Unsigned and signed integer of a value's width, and its exponent bits: all of them set is inf or NaN (IEEE 754)."""


class Sink(Protocol):
    """Where blocks are read to, and written from once they are known to be right."""

    def room(self, size: int) -> memoryview: ...
    def took(self, size: int) -> None: ...


def hash_and_check(
    states_slh: NDArray[Any] | RowsOnDisk, dtype: str, digest: xxhash.xxh3_128, label: str, sink: Sink | None = None
) -> None:
    """Feeds the states to `digest` and checks them in the same pass (6 GB/s a core from memory). With a `sink` each block is put
    into its room first and taken once it has passed: what is checked is what is written, while it is in the cache.

    Raises DumpRejected: `not-finite` (a value whose exponent bits are all set is inf or NaN), `zero-rows` (a layer of a token that
    is zero throughout), `layers-equal` (two stored layers that are the same).
    """
    layers, start = states_slh.shape[1], 0
    for block_rh in _blocks(states_slh, dtype, sink):
        digest.update(block_rh.data)
        found = _first_bad_row(block_rh, dtype)
        if found is not None:
            row, what, reason = start + found[0], found[1], found[2]
            raise DumpRejected(
                f"{label}: token {row // layers}, stored layer {row % layers}: {what}; the sample is extracted again", reason=reason
            )
        start += len(block_rh)
        if start == len(states_slh) * layers:
            _check_columns_distinct(block_rh[-layers:], states_slh, label)
        if sink is not None:
            sink.took(block_rh.nbytes)


def _blocks(states_slh: NDArray[Any] | RowsOnDisk, dtype: str, sink: Sink | None) -> Iterator[NDArray[Any]]:
    """The bit patterns of rows [tokens * layers, hidden], some at a time. A block of a file is overwritten by the next one."""
    word, (tokens, *row_lh) = _BITS[dtype][0], states_slh.shape
    row_bytes = states_slh.dtype.itemsize * prod(row_lh)
    step = min(tokens, max(1, BLOCK_BYTES // max(1, row_bytes)))
    buffer = None if sink is not None or isinstance(states_slh, np.ndarray) else np.empty((step, *row_lh), states_slh.dtype)
    for start in range(0, tokens, max(1, step)):
        stop = min(start + step, tokens)
        if sink is not None:
            buffer = np.frombuffer(sink.room((stop - start) * row_bytes), states_slh.dtype).reshape(-1, *row_lh)
        if isinstance(states_slh, RowsOnDisk):
            block_rlh = states_slh.read(start, stop, buffer)
        elif buffer is not None:
            block_rlh = buffer
            block_rlh[:] = states_slh[start:stop]
        else:
            block_rlh = np.ascontiguousarray(states_slh[start:stop])
        yield block_rlh.reshape(-1, row_lh[-1]).view(word)


def _first_bad_row(block_rh: NDArray[Any], dtype: str) -> tuple[int, str, str] | None:
    """(row, what, reason) of the first row with a value that is not finite, or of zeros; None where there is none.

    Written for speed: two maxima, no temporary of the block's size. As signed integers positive floats keep their order and
    negative ones are below them; as unsigned integers negative ones are on top. So two maxima show whether any exponent is full.
    """
    word, signed, exponent = _BITS[dtype]
    sign = 1 << (8 * block_rh.itemsize - 1)
    if block_rh.size and (block_rh.max() >= sign | exponent or block_rh.view(signed).max() >= exponent):
        full_r = ((block_rh & word(exponent)) == word(exponent)).any(axis=1)
        return int(full_r.argmax()), "a NaN or infinite value", "not-finite"
    # A row of zeros begins with zeros: only such rows are looked at in full. The shift drops the sign of -0.
    begun_r = (block_rh[:, :_HEAD] << word(1)).any(axis=1)
    if begun_r.all():
        return None
    suspects = np.flatnonzero(~begun_r)
    zero = suspects[~(block_rh[suspects] << word(1)).any(axis=1)]
    return (int(zero[0]), "all zeros", "zero-rows") if len(zero) else None


def check_columns_distinct(states_slh: NDArray[Any] | RowsOnDisk, label: str) -> None:
    """Raises DumpRejected (`layers-equal`) when two stored layers are bit for bit the same over all tokens."""
    if len(states_slh):
        _check_columns_distinct(states_slh[-1], states_slh, label)


def _check_columns_distinct(last_lh: NDArray[Any], states_slh: NDArray[Any] | RowsOnDisk, label: str) -> None:
    layers = len(last_lh)
    if len({last_lh[layer, :_HEAD].tobytes() for layer in range(layers)}) == layers:
        return  # the first values of the last token tell them apart
    for a in range(layers):
        for b in range(a + 1, layers):
            # The last token decides nearly always; the whole column only where it is equal.
            if np.array_equal(last_lh[a], last_lh[b]) and np.array_equal(states_slh[:, a], states_slh[:, b]):
                raise DumpRejected(
                    f"{label}: stored layers {a} and {b} are the same; expected distinct layers; check the engine's layer ids",
                    reason="layers-equal",
                )


def check_shape(
    states_slh: NDArray[Any] | RowsOnDisk, dtype: str, tokens: int, expected_lh: tuple[int, int], expected_dtype: str, label: str
) -> None:
    """Raises DumpRejected (`row-count`, `shape`, `dtype`) unless the states are [tokens, L, H] in the store's dtype."""
    if states_slh.shape[0] != tokens:
        raise DumpRejected(
            f"{label}: expected {tokens} rows, found {states_slh.shape[0]}; a cached prefix or a cut prompt: "
            "disable the radix cache or send a fresh extra_key",
            reason="row-count",
        )
    if states_slh.shape[1:] != expected_lh:
        raise DumpRejected(f"{label}: expected layers x hidden {expected_lh}, found {states_slh.shape[1:]}", reason="shape")
    if dtype != expected_dtype:
        raise DumpRejected(
            f"{label}: expected dtype {expected_dtype}, found {dtype}; start the engine with the model's own dtype (--dtype)",
            reason="dtype",
        )


def check_token_ids(found_s: NDArray[Any] | None, expected_s: NDArray[Any], label: str) -> None:
    """Raises DumpRejected (`token-ids`) when the dump carries ids that are not those sent. None (none carried) passes."""
    if found_s is not None and not np.array_equal(found_s, expected_s):
        same = min(len(found_s), len(expected_s))
        differs = np.flatnonzero(found_s[:same] != expected_s[:same])
        at = int(differs[0]) if len(differs) else same
        raise DumpRejected(
            f"{label}: token ids differ from those sent, first at position {at}: another request's dump", reason="token-ids"
        )


def relative_frobenius(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """||found - expected|| / ||expected||; infinite for different shapes."""
    if found.shape != expected.shape:
        return float("inf")
    return float(np.linalg.norm((found - expected).ravel()) / max(float(np.linalg.norm(expected.ravel())), 1e-30))


class States(Protocol):
    """States [S, L, H] in storage form, in memory or on disk, with their dtype's name."""

    @property
    def states_slh(self) -> NDArray[Any] | RowsOnDisk: ...
    @property
    def dtype(self) -> str: ...


def states_distance(found: States, expected: States, *, of_beginning: bool = False) -> float:
    """How far two extractions of one prompt are apart: per layer the root mean square over the tokens of |found - expected| /
    |expected|, and of these the largest. Infinite for different shapes or values that are not finite. `of_beginning`: `found` is
    of the prompt's first tokens only, and compared with those.

    Each layer and each token counts alike. In one norm over everything the last layers and the first tokens (attention sinks), a
    hundred times as large as others in many models, hide that an early layer is its neighbour or that most rows are another's.
    Some rows at a time: in single precision two dumps of the field's size would take a gigabyte.
    """
    (tokens, *found_lh), (all_tokens, *expected_lh) = found.states_slh.shape, expected.states_slh.shape
    if found_lh != expected_lh or tokens > all_tokens or (tokens < all_tokens and not of_beginning):
        return float("inf")
    square_l = np.zeros(found_lh[0])
    step = max(1, BLOCK_BYTES // max(1, 4 * prod(expected_lh)))
    with np.errstate(all="ignore"):
        for start in range(0, tokens, step):
            rows = slice(start, min(start + step, tokens))
            expected_rlh = as_float32(expected.states_slh[rows], expected.dtype)
            apart_rlh = as_float32(found.states_slh[rows], found.dtype) - expected_rlh
            square_l += (_squared(apart_rlh) / np.maximum(_squared(expected_rlh), 1e-60)).sum(axis=0)
        worst = float(np.sqrt(square_l / max(tokens, 1)).max(initial=0))
    return worst if np.isfinite(worst) else float("inf")


def _squared(values_rlh: NDArray[np.float32]) -> NDArray[np.float64]:
    """Squared sizes [R, L]."""
    return np.einsum("rlh,rlh->rl", values_rlh, values_rlh).astype(np.float64)
