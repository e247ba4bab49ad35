"""The timed mode: a law of time, dumps of a set size, nothing computed."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xxhash

from drafter_data.safetensors_file import TensorFile
from drafter_data.verification import hash_and_check
from tests.embedded.conftest import RunningEngine

Start = Callable[..., RunningEngine]


@pytest.mark.parametrize(("dtype", "stored"), [("bf16", "BF16"), ("fp32", "F32")])
def test_timed_dump_is_of_the_size_asked_for_and_passes_the_content_checks(start_engine: Start, dtype: str, stored: str) -> None:
    engine = start_engine("--timed", "--hidden-size", "512", "--num-layers", "12", "--dtype", dtype)
    ids = np.random.default_rng(0).integers(0, 200_000, 1500).tolist()
    engine.generate(ids, "dd-a")
    (file,) = engine.labelled("dd-a")
    states_slh = file.array("hidden_states")
    assert (file.tensors["hidden_states"].dtype, states_slh.shape) == (stored, (1500, 4, 512))
    hash_and_check(states_slh, stored, xxhash.xxh3_128(), "timed")
    engine.generate(ids, "dd-b")
    engine.generate(ids[:700] + ids[701:], "dd-c")
    np.testing.assert_array_equal(engine.states("dd-b"), states_slh)
    np.testing.assert_array_equal(engine.states("dd-c")[:700], states_slh[:700])
    assert not np.array_equal(engine.states("dd-c")[700:], states_slh[700:-1]), "rows follow from ids and positions"


def test_timed_passes_keep_the_law_of_time(start_engine: Start) -> None:
    flags = ["--timed", "--hidden-size", "64", "--num-layers", "12", "--timed-base-ms", "100", "--timed-us-per-token", "50"]
    engine = start_engine(*flags)
    for tokens, least, pieces in [(10, 0.1005, 1), (2000, 0.2, 1), (20_000, 1.3, 3)]:
        started = time.monotonic()
        engine.generate([5] * tokens, f"dd-{tokens}")
        assert least <= time.monotonic() - started < least + 2.5
        assert len(engine.labelled(f"dd-{tokens}")) == pieces, "at most 8,192 tokens a pass"


def test_timed_passes_are_shared_by_requests_in_flight(start_engine: Start) -> None:
    engine = start_engine("--timed", "--hidden-size", "64", "--num-layers", "12", "--timed-base-ms", "400")
    started = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda n: engine.generate([n] * 20, f"dd-{n}"), range(16)))
    assert time.monotonic() - started < 16 * 0.4 * 0.6


def test_timed_unlabelled_dumps_hold_the_same_rows(start_engine: Start) -> None:
    flags = ["--timed", "--hidden-size", "64", "--num-layers", "8", "--timed-base-ms", "1", "--skip-server-warmup"]
    labelled, unlabelled = start_engine(*flags), start_engine(*flags, "--dumps", "unlabelled")
    ids = list(range(3000))
    labelled.generate(ids)
    unlabelled.generate(ids)
    assert unlabelled.passes() == [("req_00000000", 3000)]
    for column, layer in enumerate((2, 4, 5, 8)):
        file = TensorFile.open(unlabelled.dumps / "req_00000000" / f"layer_{layer}.safetensors")
        np.testing.assert_array_equal(file.array("hidden_states"), labelled.states("dd-1")[:, column])


def test_timed_info_says_so(start_engine: Start) -> None:
    info = start_engine("--timed", "--hidden-size", "7168", "--num-layers", "61").get("/server_info").json()
    assert info["drafter_data"]["timed"] is True
    assert (info["drafter_data"]["hidden_size"], info["drafter_data"]["num_layers"]) == (7168, 61)
    assert info["drafter_data"]["layers"] == [2, 30, 58, 61]
    assert info["dtype"] == "bfloat16"
