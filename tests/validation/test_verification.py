"""One pass over the bytes: checksum, finiteness and zero rows, whatever the dtype and the block bounds."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from drafter_data import verification
from drafter_data.errors import DumpRejected
from drafter_data.safetensors_file import decode_bf16
from drafter_data.verification import hash_and_check

DTYPES = ["F32", "F16", "BF16"]


def states_in(dtype: str, shape: tuple[int, int, int] = (40, 4, 24), seed: int = 0) -> np.ndarray:
    states = np.random.default_rng(seed).normal(0, 50, shape).astype(np.float32)
    return (states.view(np.uint32) >> 16).astype(np.uint16) if dtype == "BF16" else states.astype({"F32": "f4", "F16": "f2"}[dtype])


def raw(dtype: str, value: float) -> np.generic:
    if dtype == "BF16":
        return np.uint16(np.array(value, np.float32).view(np.uint32) >> 16)
    return np.array(value, {"F32": "f4", "F16": "f2"}[dtype])[()]


@pytest.mark.parametrize("dtype", DTYPES)
def test_hash_and_check_good_states_give_the_checksum_of_their_bytes(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "BLOCK_BYTES", 1000)
    for states in (states_in(dtype), states_in(dtype, (1, 4, 3)), states_in(dtype)[::2]):
        digest = xxhash.xxh3_128()
        hash_and_check(states, dtype, digest, "x")
        assert digest.hexdigest() == xxhash.xxh3_128(np.ascontiguousarray(states).tobytes()).hexdigest()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_hash_and_check_value_that_is_not_finite_is_found_wherever_it_is(
    dtype: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "BLOCK_BYTES", 1000)
    for place in ((0, 0, 0), (17, 2, 11), (39, 3, 23)):
        states = states_in(dtype)
        states[place] = raw(dtype, value)
        with pytest.raises(DumpRejected, match=f"token {place[0]}, stored layer {place[1]}") as raised:
            hash_and_check(states, dtype, xxhash.xxh3_128(), "x")
        assert raised.value.reason == "not-finite"


@pytest.mark.parametrize("dtype", DTYPES)
def test_hash_and_check_row_of_zeros_of_either_sign_is_found_and_nearly_zero_rows_pass(dtype: str) -> None:
    states = states_in(dtype)
    states[5, 1] = 0
    states[5, 1, 20] = raw(dtype, 1e-4)
    states[6, :, :12] = 0
    hash_and_check(states, dtype, xxhash.xxh3_128(), "x")
    for zero in (0.0, -0.0):
        states[5, 1] = raw(dtype, zero)
        with pytest.raises(DumpRejected, match="token 5, stored layer 1: all zeros") as raised:
            hash_and_check(states, dtype, xxhash.xxh3_128(), "x")
        assert raised.value.reason == "zero-rows"


@pytest.mark.parametrize("dtype", DTYPES)
def test_hash_and_check_every_finite_pattern_of_sixteen_bits_passes_and_no_other(dtype: str) -> None:
    patterns = np.arange(65536, dtype=np.uint16)
    if dtype == "F32":
        values = (patterns.astype(np.uint32) << 16).view(np.float32)
        finite = np.isfinite(values)
    elif dtype == "F16":
        values, finite = patterns.view(np.float16), np.isfinite(patterns.view(np.float16))
    else:
        values, finite = patterns, np.isfinite(decode_bf16(patterns))
    one = raw(dtype, 1.0)
    for k in range(0, 65536, 97):
        row = np.full((1, 1, 4), one, dtype=values.dtype)
        row[0, 0, 2] = values[k]
        if finite[k]:
            hash_and_check(row, dtype, xxhash.xxh3_128(), "x")
        else:
            with pytest.raises(DumpRejected):
                hash_and_check(row, dtype, xxhash.xxh3_128(), "x")
