"""The labelled way on a real, unpatched SGLang: every stored state against transformers' own forward pass.

Tests of one configuration stand together: the server is started once for them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import requests
import torch

from data_contracts.dump import ACKNOWLEDGEMENT, name_of
from drafter_data.dataset import Dataset
from drafter_data.errors import PreflightRefused
from drafter_data.store.store import Store
from drafter_data.trainers.folder import read_manifest
from drafter_data.validation import validate_store
from tests.docs.test_commands import commands_of
from tests.engines.comparing import assert_complete, decided_prompts_of, errors_of, extract, health_checks, prompts_of
from tests.engines.reference import Reference
from tests.engines.servers import Configuration, Engines, Running

pytestmark = pytest.mark.real_engine

FP32 = 1e-4
SAMPLES = 200
FEW = 40
LAYERS = (2, 4, 5, 8)


def llama(models: dict[str, Path]) -> Configuration:
    """The plain configuration."""
    return Configuration("llama", models["llama"], flags=("--dtype", "float32"))


def test_sglang_llama_float32_equals_transformers(engines: Engines, models: dict[str, Path], tmp_path: Path) -> None:
    running = engines.running(llama(models))
    prompts = prompts_of(SAMPLES)
    with health_checks(running) as statuses:
        report, dataset, store = extract(tmp_path, prompts, running.parameters())
    assert_complete(report, dataset, store)
    assert statuses and set(statuses) == {200}
    assert store.identity.layers == LAYERS
    errors = errors_of(store, prompts, Reference(models["llama"]))
    print(errors)
    assert errors.largest <= FP32
    assert list(running.dump_folder.iterdir()) == []


def send(running: Running, token_ids: list[int], request_id: str) -> requests.Response:
    """A request as any client could send it."""
    body = {"input_ids": token_ids, "rid": request_id, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    return requests.post(f"{running.url}/generate", json=body, timeout=60)


@pytest.mark.parametrize("request_id", ["dd-../../escaped", "../escaped", "/escaped", "dd-" + "long" * 1000, "dd-\u00e9\x00x"])
def test_sglang_hostile_request_id_stays_inside_the_dump_folder(engines: Engines, models: dict[str, Path], request_id: str) -> None:
    running = engines.running(llama(models))
    outside = {path for folder in (running.dump_folder.parent, Path("/")) for path in folder.iterdir()}
    reply = send(running, [5, 6, 7, 8], request_id)
    inside = [path.name for path in running.dump_folder.iterdir()]
    for name in inside:
        (running.dump_folder / name).unlink()
    assert {path for folder in (running.dump_folder.parent, Path("/")) for path in folder.iterdir()} <= outside
    if request_id.startswith("dd-") and len(request_id) < 1000:
        assert inside == [name_of(request_id, 0, 4)]
    else:
        assert inside == []
    if len(request_id) > 1000:
        assert "too long" in reply.json()["meta_info"][ACKNOWLEDGEMENT][-1]["error"]
    assert send(running, [5, 6], "plain").status_code == 200


def test_sglang_link_in_place_of_a_dump_is_replaced_not_followed(engines: Engines, models: dict[str, Path], tmp_path: Path) -> None:
    running = engines.running(llama(models))
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    link = running.dump_folder / name_of("dd-linked", 0, 3)
    link.symlink_to(precious)
    assert send(running, [5, 6, 7], "dd-linked").json()["meta_info"][ACKNOWLEDGEMENT][-1]["error"] == ""
    assert precious.read_text() == "keep me"
    assert link.is_file() and not link.is_symlink()
    link.unlink()


def test_sglang_full_dump_folder_is_acknowledged_and_the_server_lives(engines: Engines, models: dict[str, Path]) -> None:
    running = engines.running(llama(models))
    moved = running.dump_folder.with_name(running.dump_folder.name + "-moved")
    running.dump_folder.rename(moved)
    try:
        error = send(running, [5, 6, 7], "dd-no-folder").json()["meta_info"][ACKNOWLEDGEMENT][-1]["error"]
    finally:
        moved.rename(running.dump_folder)
    assert "No such file" in error
    assert send(running, [5, 6, 7], "dd-again").json()["meta_info"][ACKNOWLEDGEMENT][-1]["error"] == ""
    (running.dump_folder / name_of("dd-again", 0, 3)).unlink()


def test_sglang_another_model_is_refused_naming_the_flag(engines: Engines, models: dict[str, Path], tmp_path: Path) -> None:
    running = engines.running(llama(models))
    with pytest.raises(PreflightRefused, match="--model-path"):
        extract(tmp_path, prompts_of(5, 1, 50), running.parameters(model=str(models["qwen3"])))
    assert not (tmp_path / "store").exists()


def test_sglang_other_layers_are_refused_naming_the_command(engines: Engines, models: dict[str, Path], tmp_path: Path) -> None:
    running = engines.running(llama(models))
    with pytest.raises(PreflightRefused, match="engine sglang --print"):
        extract(tmp_path, prompts_of(5, 1, 50), running.parameters(layers=(1, 4, 5, 8)))


def test_sglang_guide_commands_in_order_fill_a_valid_store(engines: Engines, models: dict[str, Path], tmp_path: Path) -> None:
    running = engines.running(llama(models))
    rows = [{"input_ids": ids, "loss_mask": [1] * len(ids)} for ids in prompts_of(20, 5, 300, seed=5)]
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "one.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    commands = "\n".join(commands_of("docs/guide-sglang.md")).replace("http://127.0.0.1:30000", running.url)
    commands = commands.replace(" --tokenizer /models/verifier", "").replace("/models/verifier", str(models["llama"]))
    assert commands.count("drafter-data ") == 7
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-euc", commands], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert_complete_store(tmp_path)
    (canary,) = read_manifest(tmp_path / "handoff").canaries
    assert canary.engine == "sglang" and canary.figures.repeat_error <= canary.figures.tolerance <= 1e-4
    assert canary.figures.proof_error is not None and canary.figures.proof_error < 1e-3


def assert_complete_store(folder: Path) -> None:
    """Every row of `dataset` is valid in `store`."""
    found = validate_store(Store.open(folder / "store"), Dataset.open(folder / "dataset"))
    assert (found.errors, found.samples) == (0, 20), found.findings[:3]


def test_sglang_killed_in_mid_run_and_started_again_loses_nothing(
    engines: Engines, models: dict[str, Path], tmp_path: Path
) -> None:
    running = engines.running(llama(models))
    foreign = {running.dump_folder / name: name for name in ("foreign.safetensors", ".tmp-foreign", "dd1-foreign")}
    for path, text in foreign.items():
        path.write_text(text)
    prompts = prompts_of(120, 200, 1500, seed=7)
    found: list[object] = []

    def run() -> None:
        try:
            found.append(extract(tmp_path, prompts, running.parameters(), dump_timeout_seconds=5))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    _wait_for(lambda: _receipts(tmp_path) >= 40, "40 receipts")
    running.kill()
    # What a server that is killed in the middle of a file leaves: its temporary name, half the bytes, no process.
    torn = running.dump_folder / f".tmp-{name_of('dd-00000000-1', 0, 9)}.999999999.1"
    torn.write_bytes(b"\x00" * 500)
    os.utime(torn, (time.time() - 60, time.time() - 60))
    running.restart()
    thread.join(timeout=300)
    assert not thread.is_alive()
    assert isinstance(found[0], tuple), found[0]
    report, dataset, store = found[0]
    assert _receipts(tmp_path) >= 40
    assert_complete(report, dataset, store)
    assert errors_of(store, prompts[::4], Reference(models["llama"])).largest <= FP32
    assert {path: path.read_text() for path in running.dump_folder.iterdir()} == foreign
    for path in foreign:
        path.unlink()


def _receipts(folder: Path) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in (folder / "store" / "receipts").glob("*.jsonl"))


def _wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.005)


def test_sglang_qwen3_bfloat16_is_as_near_as_transformers_own(engines: Engines, models: dict[str, Path], tmp_path: Path) -> None:
    running = engines.running(Configuration("qwen3", models["qwen3"], flags=("--dtype", "bfloat16")))
    prompts = prompts_of(SAMPLES)
    with health_checks(running) as statuses:
        report, dataset, store = extract(tmp_path, prompts, running.parameters())
    assert_complete(report, dataset, store)
    assert set(statuses) == {200} and store.identity.dtype == "BF16"
    exact = Reference(models["qwen3"])
    found = errors_of(store, prompts, exact)
    theirs = transformers_own_error(models["qwen3"], prompts, store, exact)
    print(found, theirs)
    assert all(ours <= 2 * own for ours, own in zip(found.frobenius_l, theirs, strict=True))
    assert found.worst_sample <= 2 * max(theirs)


def transformers_own_error(
    model: Path, prompts: list[list[int]], store: Store, exact: Reference, every: int = 4
) -> tuple[float, ...]:
    """Relative Frobenius distance, a column, of transformers' bf16 from its fp32."""
    rounded, layers = Reference(model, torch.bfloat16), store.identity.layers
    squares_l, sizes_l = torch.zeros(len(layers)), torch.zeros(len(layers))
    for ids in prompts[::every]:
        expected = torch.from_numpy(exact.states(ids, layers))
        difference = torch.from_numpy(rounded.states(ids, layers)) - expected
        squares_l += difference.square().sum((0, 2))
        sizes_l += expected.square().sum((0, 2))
    return tuple((squares_l / sizes_l).sqrt().tolist())


def assert_few_within(engines: Engines, configuration: Configuration, folder: Path, reference: Path, high: int = 2000) -> None:
    """40 samples through a configuration, each state within 1e-4 of the largest magnitude."""
    running, expected = engines.running(configuration), Reference(reference)
    prompts = decided_prompts_of(FEW, 1, high, expected, LAYERS, seed=11)
    report, dataset, store = extract(folder, prompts, running.parameters())
    assert_complete(report, dataset, store)
    errors = errors_of(store, prompts, expected)
    print(configuration.name, errors)
    assert errors.to_magnitude <= FP32


def test_sglang_chunked_prefill_with_radix_cache_gives_whole_prompts(
    engines: Engines, models: dict[str, Path], tmp_path: Path
) -> None:
    flags = ("--dtype", "float32", "--chunked-prefill-size", "256")
    configuration = Configuration("chunked", models["llama"], flags=flags, drop=("--disable-radix-cache",))
    assert_few_within(engines, configuration, tmp_path, models["llama"])


def test_sglang_two_tensor_parallel_ranks_write_once(engines: Engines, models: dict[str, Path], tmp_path: Path) -> None:
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "OMP_NUM_THREADS": "1"}
    configuration = Configuration("tp2", models["llama"], flags=("--dtype", "float32", "--tp-size", "2"), env=env)
    assert_few_within(engines, configuration, tmp_path, models["llama"])


def test_sglang_deepseek_v3_equals_transformers(engines: Engines, models: dict[str, Path], tmp_path: Path) -> None:
    configuration = Configuration("deepseek", models["deepseek"], flags=("--dtype", "float32"))
    assert_few_within(engines, configuration, tmp_path, models["deepseek"], high=1500)


def test_sglang_kimi_text_part_equals_transformers(engines: Engines, models: dict[str, Path], tmp_path: Path) -> None:
    flags = ("--dtype", "float32", "--trust-remote-code")
    configuration = Configuration("kimi", models["kimi"], flags=flags)
    assert_few_within(engines, configuration, tmp_path, models["kimi"] / "text", high=1500)


def test_sglang_layers_at_their_input_norms_equal_transformers(engines: Engines, models: dict[str, Path], tmp_path: Path) -> None:
    configuration = Configuration(
        "input-norms", models["llama"], layers=(0, 1, 3, 7, 8), via="input_layernorm", flags=("--dtype", "float32")
    )
    assert_few_within(engines, configuration, tmp_path, models["llama"])


def test_sglang_plugin_equals_transformers(engines: Engines, models: dict[str, Path], tmp_path: Path) -> None:
    configuration = Configuration("plugin", models["llama"], via="plugin", flags=("--dtype", "float32"))
    assert_few_within(engines, configuration, tmp_path, models["llama"])
