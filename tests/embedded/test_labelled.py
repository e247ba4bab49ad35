"""Labelled dumps of a served engine: whose, complete, right."""

from __future__ import annotations

import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from data_contracts.dump import HEADER_BYTES, name_of
from drafter_data.embedded.backend import log_softmax
from drafter_data.embedded.llama import Llama
from drafter_data.embedded.rows import to_storage
from drafter_data.safetensors_file import as_float32
from tests.embedded.conftest import LAYERS, RunningEngine

Start = Callable[..., RunningEngine]


def test_labelled_dump_holds_ids_states_and_metadata(start_engine: Start, model: Llama) -> None:
    engine = start_engine()
    ids = np.random.default_rng(0).integers(0, 1024, 300)
    reply = engine.generate(ids.tolist(), "dd-../a b")
    assert reply["meta_info"]["drafter_data"] == {"version": 1, "start": 0, "end": 300, "error": ""}
    assert [path.name for path in engine.dumps.iterdir()] == [name_of("dd-../a b", 0, 300)]
    path = next(engine.dumps.iterdir())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(engine.dumps.stat().st_mode) == 0o700
    (file,) = engine.labelled("dd-../a b")
    assert file.header_bytes == HEADER_BYTES
    assert list(file.tensors) == ["token_ids", "hidden_states"]
    assert file.metadata == {
        "rid": "dd-../a b", "start": "0", "end": "300", "layers": "2,4,5,8", "final_norm": "pre", "version": "1",
    }  # fmt: skip
    np.testing.assert_array_equal(file.array("token_ids"), ids)
    np.testing.assert_allclose(file.array("hidden_states"), model.forward(ids, LAYERS), atol=1e-4, rtol=0)


def test_labelled_dumps_of_many_at_once_same_bits_as_alone(start_engine: Start, model: Llama) -> None:
    busy, quiet = start_engine("--chunked-prefill-size", "700", "--max-prefill-tokens", "1500"), start_engine()
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 1024, n) for n in rng.integers(1, 900, 40)]
    with ThreadPoolExecutor(32) as pool:
        replies = list(pool.map(lambda i: busy.generate(prompts[i].tolist(), f"dd-{i}"), range(len(prompts))))
    assert [reply["meta_info"]["prompt_tokens"] for reply in replies] == [len(ids) for ids in prompts]
    assert any(len(busy.labelled(f"dd-{index}")) > 1 for index in range(40)), "no prompt was cut: chunking was not exercised"
    for index, ids in enumerate(prompts):
        quiet.generate(ids.tolist(), f"dd-{index}")
        np.testing.assert_array_equal(busy.states(f"dd-{index}"), quiet.states(f"dd-{index}"))
        if index % 8 == 0:
            np.testing.assert_allclose(busy.states(f"dd-{index}"), model.forward(ids, LAYERS), atol=1e-4, rtol=0)


def test_other_requests_leave_no_labelled_dump(start_engine: Start) -> None:
    engine = start_engine()
    assert "drafter_data" not in engine.generate([1, 2, 3], "someone-else", 3)["meta_info"]
    assert engine.get("/health_generate").status_code == 200
    assert list(engine.dumps.iterdir()) == []


def test_final_norm_post_normalises_the_last_column_only(start_engine: Start, model: Llama) -> None:
    engine = start_engine("--final-norm", "post", "--layers", "0,3,8")
    ids = np.arange(50)
    engine.generate(ids.tolist())
    expected_slh = model.forward(ids, (0, 3, 8))
    expected_slh[:, -1] = model.final_norm(expected_slh[:, -1])
    np.testing.assert_allclose(engine.states("dd-1"), expected_slh, atol=1e-4, rtol=0)
    assert engine.get("/server_info").json()["drafter_data"]["final_norm"] == "post"


def test_reply_logprobs_agree_with_an_own_forward_pass(start_engine: Start, model: Llama) -> None:
    engine = start_engine()
    ids = np.random.default_rng(2).integers(0, 1024, 40)
    meta = engine.generate(ids.tolist(), return_logprob=True, top_logprobs_num=8, logprob_start_len=0)["meta_info"]
    logprobs_sv = log_softmax(model.logits(model.forward(ids, LAYERS)[:, -1]))
    (top,) = meta["output_top_logprobs"]
    assert [token for _, token, _ in top] == np.argsort(-logprobs_sv[-1])[:8].tolist()
    assert [value for value, _, _ in top] == pytest.approx(np.sort(logprobs_sv[-1])[::-1][:8].tolist(), abs=1e-5)
    assert meta["input_token_logprobs"][0] == [None, int(ids[0]), None]
    assert [value for value, _, _ in meta["input_token_logprobs"][1:]] == pytest.approx(
        logprobs_sv[np.arange(39), ids[1:]].tolist(), abs=1e-5
    )
    assert meta["input_top_logprobs"][0] is None
    assert meta["input_top_logprobs"][5][0][1] == int(logprobs_sv[4].argmax())


def test_greedy_decode_agrees_with_repeated_prefill(start_engine: Start, model: Llama) -> None:
    engine = start_engine()
    ids = [5, 6, 7]
    reply = engine.generate(ids, new_tokens=12)
    expected = list(ids)
    for _ in range(len(reply["output_ids"])):
        expected.append(int(model.logits(model.forward(np.array(expected), LAYERS)[-1:, -1]).argmax()))
    assert reply["output_ids"] == expected[3:]
    assert len(engine.labelled("dd-1")) == 1, "decode steps are not dumped with a label"
    assert engine.generate(ids, "dd-2", 0)["output_ids"] == []
    np.testing.assert_array_equal(engine.states("dd-1"), engine.states("dd-2"))


def test_request_log_names_what_was_sent(start_engine: Start) -> None:
    engine = start_engine()
    engine.generate([1, 2, 3], "dd-a")
    engine.generate([4], "other")
    assert [(line["rid"], line["tokens"]) for line in engine.logged()] == [("dd-a", 3), ("other", 1)]


@pytest.mark.parametrize(("dtype", "stored"), [("bfloat16", "BF16"), ("float16", "F16")])
def test_half_precision_model_dumps_in_its_own_dtype_rounded_as_torch_rounds(
    start_engine: Start, tmp_path: Path, dtype: str, stored: str
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        vocab_size=400, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        max_position_embeddings=64, dtype=dtype,
    )  # fmt: skip
    folder = tmp_path / "half"
    transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    engine = start_engine("--layers", "1,2,4", model=folder)
    ids = np.arange(5, 60)
    engine.generate(ids.tolist())
    (file,) = engine.labelled("dd-1")
    assert file.tensors["hidden_states"].dtype == stored
    assert engine.get("/server_info").json()["dtype"] == dtype
    expected_slh = Llama.load(folder).forward(ids, (1, 2, 4))
    found_slh = as_float32(file.array("hidden_states"), stored)
    np.testing.assert_allclose(found_slh, expected_slh, rtol=2**-8 if stored == "BF16" else 2**-11, atol=1e-5)
    values = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    values[:4] = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0.0]  # halfway between two bfloat16
    rounded = torch.tensor(values).to(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(as_float32(to_storage(values, stored), stored), rounded)
