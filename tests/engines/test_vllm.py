"""A real vLLM on the CPU: its files, claimed by request id and token ids, against transformers' own forward pass."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from drafter_data.engines.base import PrefillReply, PrefillRequest
from drafter_data.engines.connect import connect
from drafter_data.errors import DumpRejected, PreflightRefused, RequestRefused
from tests.engines.comparing import assert_complete, errors_of, extract, health_checks, prompts_of
from tests.engines.reference import Reference
from tests.engines.servers import Configuration, Engines

pytestmark = pytest.mark.real_engine

FP32 = 1e-4


def vllm(models: dict[str, Path]) -> Configuration:
    """Prefix caching on, as is vLLM's default."""
    flags = ("--dtype", "float32", "--enable-prefix-caching")
    return Configuration("vllm", models["llama"], engine="vllm", layers=(2, 4, 5, 8), flags=flags)


def test_vllm_llama_float32_equals_transformers(engines: Engines, models: dict[str, Path], tmp_path: Path) -> None:
    running = engines.running(vllm(models))
    prompts = prompts_of(200)
    shared = prompts[5][:300] if len(prompts[5]) > 300 else prompts[5]
    prompts[10:14] = [shared + [40 + k] * (k + 1) for k in range(4)]  # prefixes that the cache already holds
    with health_checks(running, "/health") as statuses:
        report, dataset, store = extract(tmp_path, prompts, running.parameters())
    assert_complete(report, dataset, store)
    assert set(statuses) == {200}
    # In float64: transformers' own float32 is up to 7e-5 from it, as far as vLLM's, which adds in another order.
    errors = errors_of(store, prompts, Reference(models["llama"], torch.float64))
    print(errors)
    assert errors.largest <= FP32
    assert list(running.dump_folder.iterdir()) == []


def test_vllm_longest_prompt_is_taken_and_one_more_is_refused(engines: Engines, models: dict[str, Path], tmp_path: Path) -> None:
    running = engines.running(vllm(models))
    engine = connect(running.parameters(), request_timeout_seconds=60)
    try:
        limit = engine.describe().max_prompt_tokens
        assert limit == 4095
        fits = PrefillRequest(engine.new_request_id(), "longest", np.arange(limit) % 900 + 20)
        dump = engine.claim(fits, engine.send(fits), time.monotonic() + 60)
        assert dump.states_slh.shape == (limit, 4, 128)
        engine.release(dump)
        with pytest.raises(RequestRefused):
            engine.send(PrefillRequest(engine.new_request_id(), "too long", np.arange(limit + 1) % 900 + 20))
    finally:
        engine.close()


@pytest.mark.parametrize("path", ["/etc/passwd", "{folder}/../escaped", "{folder}/sub/x.safetensors", "{folder}/cmpl-dd-other-0-1"])
def test_vllm_reply_that_names_a_file_outside_is_rejected(
    engines: Engines, models: dict[str, Path], tmp_path: Path, path: str
) -> None:
    running = engines.running(vllm(models))
    engine = connect(running.parameters(), request_timeout_seconds=60)
    try:
        request = PrefillRequest(engine.new_request_id(), "hostile", np.array([20, 21, 22]))
        reply = engine.send(request)
        meta = {"kv_transfer_params": {"hidden_states_path": path.format(folder=running.dump_folder)}}
        hostile = PrefillReply(request.request_id, 3, 0, reply.sent_at, reply.seconds, meta=meta)
        with pytest.raises(DumpRejected):
            engine.claim(request, hostile, time.monotonic() + 1)
        dump = engine.claim(request, reply, time.monotonic() + 30)
        engine.release(dump)
    finally:
        engine.close()
    assert Path("/etc/passwd").exists() and list(running.dump_folder.iterdir()) == []


def test_vllm_link_in_place_of_the_file_is_not_followed(engines: Engines, models: dict[str, Path], tmp_path: Path) -> None:
    running = engines.running(vllm(models))
    engine = connect(running.parameters(), request_timeout_seconds=60)
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    try:
        request = PrefillRequest(engine.new_request_id(), "link", np.array([20, 21, 22]))
        reply = engine.send(request)
        path = Path(str(reply.meta["kv_transfer_params"]["hidden_states_path"]))
        engine.claim(request, reply, time.monotonic() + 30).close()
        path.unlink()
        path.symlink_to(precious)
        with pytest.raises(DumpRejected):
            engine.claim(request, reply, time.monotonic() + 5)
        engine.abandon(request)
    finally:
        engine.close()
    assert precious.read_text() == "keep me" and list(running.dump_folder.iterdir()) == []


def test_vllm_left_overs_of_a_dead_run_go_and_foreign_files_stay(engines: Engines, models: dict[str, Path]) -> None:
    running = engines.running(vllm(models))
    dead = running.dump_folder / "cmpl-dd-0123abcd-7-0-99.safetensors"
    foreign = running.dump_folder / "cmpl-someone-0-99.safetensors"
    for path in (dead, foreign):
        path.write_bytes(b"x")
        os.utime(path, (0, 0))
    engine = connect(running.parameters(), request_timeout_seconds=60)
    try:
        assert engine.sweep() == 1
    finally:
        engine.close()
    assert list(running.dump_folder.iterdir()) == [foreign]
    foreign.unlink()


def test_vllm_with_other_layers_model_or_too_short_a_limit_is_refused(
    engines: Engines, models: dict[str, Path], tmp_path: Path
) -> None:
    running = engines.running(vllm(models))
    with pytest.raises(PreflightRefused, match="engine vllm --print"):
        extract(tmp_path, prompts_of(5, 1, 50), running.parameters(layers=(2, 5, 8)))
    # As many layers as it writes: only the canary's own forward pass can tell.
    with pytest.raises(PreflightRefused, match=r"differ from this model's own.*engine vllm --print"):
        extract(tmp_path, prompts_of(5, 1, 50), running.parameters(layers=(1, 4, 5, 8)))
    with pytest.raises(PreflightRefused, match="weights differ"):
        extract(tmp_path, prompts_of(5, 1, 50), running.parameters(model=str(models["qwen3"])))
    with pytest.raises(PreflightRefused, match="--max-model-len"):
        extract(tmp_path / "long", prompts_of(5, 4100, 4200), running.parameters())
    assert not (tmp_path / "store").exists() and not (tmp_path / "long" / "store").exists()
