"""Dumps in the form of older patches, one folder a pass, from a real SGLang: claimed by token count and log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data_contracts.identity import state_key
from drafter_data.engines.connect import connect
from drafter_data.store.store import Store
from tests.engines.comparing import assert_complete, errors_of, extract, health_checks, prompts_of
from tests.engines.reference import Reference
from tests.engines.servers import Configuration, Engines, Running

pytestmark = pytest.mark.real_engine

FP32 = 1e-4


def older_form(hooks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The older patch in place of our hooks: nothing of ours is in /server_info."""
    config = {key: hooks[-1]["config"][key] for key in ("dump_folder", "layers")}
    return [
        {"name": "norm", "target_modules": ["*.norm"], "hook_factory": "unlabelled_hook:final_norm", "config": config},
        {"name": "dump", "target_modules": ["logits_processor"], "hook_factory": "unlabelled_hook:logits", "config": config},
    ]


def still_older_form(hooks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with layers in .pt files."""
    return [{**hook, "config": {**hook["config"], "suffix": "pt"}} for hook in older_form(hooks)]


def in_flight_limit(running: Running) -> int:
    """How many requests the adapter lets be open at once."""
    engine = connect(running.parameters("sglang-unlabelled"), request_timeout_seconds=60)
    try:
        return engine.describe().in_flight_limit
    finally:
        engine.close()


def assert_proven(store: Store, prompts: list[list[int]]) -> None:
    """Each claim was proven by the reply's log-probabilities."""
    receipts = [store.find(state_key(ids)) for ids in prompts]
    assert {receipt.proof if receipt else "" for receipt in receipts} == {"token-count+logprobs"}
    assert max(receipt.proof_error or 0 for receipt in receipts if receipt) < 1e-3


def test_unlabelled_one_request_a_pass_eight_in_flight_none_wrong(
    engines: Engines, models: dict[str, Path], tmp_path: Path
) -> None:
    flags = ("--dtype", "float32", "--prefill-max-requests", "1", "--chunked-prefill-size", "-1")
    running = engines.running(Configuration("unlabelled", models["llama"], flags=flags, hooks=older_form))
    prompts = prompts_of(60, 1, 800, seed=21)
    assert in_flight_limit(running) >= 8
    with health_checks(running):
        report, dataset, store = extract(tmp_path, prompts, running.parameters("sglang-unlabelled"), in_flight=8)
    assert_complete(report, dataset, store)
    assert_proven(store, prompts)
    errors = errors_of(store, prompts, Reference(models["llama"]))
    print(errors)
    assert errors.largest <= FP32


def test_unlabelled_mixed_passes_in_pt_files_allow_one_in_flight(engines: Engines, models: dict[str, Path], tmp_path: Path) -> None:
    flags = ("--dtype", "float32")
    running = engines.running(Configuration("unlabelled-mixed", models["llama"], flags=flags, hooks=still_older_form))
    prompts = prompts_of(30, 1, 400, seed=22)
    assert in_flight_limit(running) == 1
    with health_checks(running):
        report, dataset, store = extract(tmp_path, prompts, running.parameters("sglang-unlabelled"), in_flight=8)
    assert_complete(report, dataset, store)
    assert_proven(store, prompts)
    assert errors_of(store, prompts, Reference(models["llama"])).largest <= FP32
