"""The older patch's dumps: one folder a pass, whatever was in it, under a counter that everything moves."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from drafter_data.embedded.llama import Llama
from drafter_data.safetensors_file import TensorFile
from tests.embedded.conftest import LAYERS, RunningEngine

Start = Callable[..., RunningEngine]


def states_of(engine: RunningEngine, folder: str) -> np.ndarray:
    """[T, L, H] of one pass, from its files."""
    columns = [TensorFile.open(engine.dumps / folder / f"layer_{layer}.safetensors").array("hidden_states") for layer in LAYERS]
    return np.stack(columns, axis=1)


def test_unlabelled_counter_grows_with_warmup_health_and_decode(start_engine: Start, model: Llama) -> None:
    engine = start_engine("--dumps", "unlabelled")
    assert [tokens for _, tokens in engine.passes()] == [3] + [1] * 7, "warm-up: three tokens, seven decode steps"
    assert engine.get("/health").status_code == engine.get("/health_generate").status_code == 200
    ids = np.random.default_rng(0).integers(0, 1024, 50)
    engine.generate(ids.tolist(), new_tokens=1)
    engine.generate([7, 8, 9, 10], new_tokens=3)
    assert [tokens for _, tokens in engine.passes()][8:] == [1, 1, 50, 4, 1, 1]
    assert [name for name, _ in engine.passes()] == [f"req_{number:08d}" for number in range(14)]
    names = {path.name for path in (engine.dumps / "req_00000010").iterdir()}
    assert names == {"layer_2.safetensors", "layer_4.safetensors", "layer_5.safetensors", "layer_8.safetensors", "meta.json"}
    np.testing.assert_allclose(states_of(engine, "req_00000010"), model.forward(ids, LAYERS), atol=1e-4, rtol=0)
    np.testing.assert_allclose(states_of(engine, "req_00000008"), model.forward(np.array([0]), LAYERS), atol=1e-4, rtol=0)


def test_unlabelled_pass_of_one_request_only_with_prefill_max_requests(start_engine: Start, model: Llama) -> None:
    engine = start_engine("--dumps", "unlabelled", "--prefill-max-requests", "1", "--skip-server-warmup")
    prompts = {n: np.random.default_rng(n).integers(0, 1024, n) for n in range(20, 60)}
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda n: engine.generate(prompts[n].tolist(), f"x{n}"), prompts))
    passes = engine.passes()
    assert sorted(tokens for _, tokens in passes) == sorted(prompts)
    for name, tokens in passes[::7]:
        np.testing.assert_allclose(states_of(engine, name), model.forward(prompts[tokens], LAYERS), atol=1e-4, rtol=0)


def test_unlabelled_pass_mixes_requests_without_it(start_engine: Start, model: Llama) -> None:
    engine = start_engine("--dumps", "unlabelled", "--skip-server-warmup")
    prompts = [np.random.default_rng(n).integers(0, 1024, 100 + n) for n in range(48)]
    with ThreadPoolExecutor(24) as pool:
        list(pool.map(lambda n: engine.generate(prompts[n].tolist(), f"x{n}"), range(48)))
    passes = engine.passes()
    assert sum(tokens for _, tokens in passes) == sum(map(len, prompts))
    assert len(passes) < 48
    rows = np.concatenate([states_of(engine, name) for name, _ in passes])
    for ids in prompts[::9]:
        expected_slh = model.forward(ids, LAYERS)
        (start,) = np.flatnonzero(np.abs(rows - expected_slh[0]).max(axis=(1, 2)) < 1e-4)
        np.testing.assert_allclose(rows[start : start + len(ids)], expected_slh, atol=1e-4, rtol=0)


def test_unlabelled_continues_behind_dumps_of_an_earlier_server(start_engine: Start) -> None:
    engine = start_engine("--dumps", "unlabelled", "--skip-server-warmup")
    engine.generate([1, 2, 3])
    engine.process.stop()
    again = start_engine("--dumps", "unlabelled", "--skip-server-warmup", "--dump-folder", str(engine.dumps))
    again.generate([1, 2, 3, 4])
    assert engine.passes() == [("req_00000000", 3), ("req_00000001", 4)]
