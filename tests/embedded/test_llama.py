"""The NumPy forward pass against transformers, an independent implementation."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafter_data.checkpoints import Checkpoint
from drafter_data.embedded.checkpoint import ensure_checkpoint
from drafter_data.embedded.llama import Llama
from drafter_data.errors import InputError
from tests.embedded.conftest import LAYERS

Reference = Callable[[Path, list[int]], tuple[np.ndarray, np.ndarray]]


def reference(folder: Path, ids: np.ndarray, layers: tuple[int, ...] = LAYERS, dtype: str = "float32") -> tuple[Any, Any]:
    """States [S, L, H] (the last one pre-norm) and logits [S, V] as transformers computes them."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager")
    seen: list[Any] = []
    handle = model.model.norm.register_forward_hook(lambda module, arguments, output: seen.append(arguments[0]))
    with torch.no_grad():
        output = model(torch.tensor(ids)[None], output_hidden_states=True)
    handle.remove()
    states = [output.hidden_states[i][0] for i in layers[:-1]] + [seen[0][0]]
    return np.stack([state.float().numpy() for state in states], axis=1), output.logits[0].float().numpy()


@pytest.mark.parametrize("tokens", [1, 2, 127, 128, 129, 300, 512])
def test_forward_states_and_logits_agree_with_transformers(checkpoint: Path, model: Llama, tokens: int) -> None:
    ids = np.random.default_rng(tokens).integers(0, 1024, tokens)
    states_slh = model.forward(ids, LAYERS)
    expected_slh, expected_sv = reference(checkpoint, ids)
    np.testing.assert_allclose(states_slh, expected_slh, atol=1e-4, rtol=0)
    np.testing.assert_allclose(model.logits(states_slh[:, -1]), expected_sv, atol=1e-4, rtol=0)


def test_forward_in_pieces_with_cache_agrees_with_whole(model: Llama) -> None:
    ids = np.random.default_rng(0).integers(0, 1024, 200)
    cache = model.cache(200)
    pieces = [model.forward(ids[a:b], LAYERS, cache) for a, b in [(0, 150), (150, 151), (151, 199), (199, 200)]]
    np.testing.assert_allclose(np.concatenate(pieces), model.forward(ids, LAYERS), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}, "rope_theta": None},
        {
            "rope_theta": 10000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
        },
    ],
)
def test_forward_rope_spellings_agree_with_transformers(checkpoint: Path, tmp_path: Path, rope: dict[str, Any]) -> None:
    folder = variant(checkpoint, tmp_path, rope)
    ids = np.random.default_rng(3).integers(0, 1024, 400)
    np.testing.assert_allclose(Llama.load(folder).forward(ids, LAYERS), reference(folder, ids)[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_forward_other_small_llama_of_half_weights_agrees_with_transformers(tmp_path: Path, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=48, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=1, intermediate_size=100,
        max_position_embeddings=128, tie_word_embeddings=True, dtype=dtype,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype))
    made.save_pretrained(tmp_path / "other", max_shard_size="50KB")
    loaded = Llama.load(tmp_path / "other")
    ids = np.random.default_rng(5).integers(0, 300, 100)
    expected_slh, expected_sv = reference(tmp_path / "other", ids, (0, 1, 3))
    states_slh = loaded.forward(ids, (0, 1, 3))
    np.testing.assert_allclose(states_slh, expected_slh, atol=1e-4, rtol=0)
    np.testing.assert_allclose(loaded.logits(states_slh[:, -1]), expected_sv, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"model_type": "qwen3"}, "qwen3"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_attention_heads": "four"}, "four"),
        ({"num_key_value_heads": 4}, "shape"),
        ({"intermediate_size": 100}, "shape"),
        ({"dtype": "float64"}, "float64"),
    ],
)
def test_load_what_is_not_computed_is_refused(checkpoint: Path, tmp_path: Path, change: dict[str, Any], found: str) -> None:
    with pytest.raises(InputError, match=found):
        Llama.load(variant(checkpoint, tmp_path, change))


def test_load_missing_or_cut_checkpoint_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json"):
        Llama.load(tmp_path / "nothing")
    cut = variant(checkpoint, tmp_path, {"num_hidden_layers": 9})
    with pytest.raises(InputError, match=r"model\.layers\.8"):
        Llama.load(cut)


def test_ensure_checkpoint_same_seed_same_bytes_and_other_seed_refused(checkpoint: Path, tmp_path: Path) -> None:
    again = ensure_checkpoint(tmp_path / "again")
    assert (again / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    assert ensure_checkpoint(again) == again
    with pytest.raises(InputError, match="seed 1, found that of seed 0"):
        ensure_checkpoint(again, seed=1)
    other = ensure_checkpoint(tmp_path / "other", seed=1)
    assert Checkpoint.open(other).weights_digest() != Checkpoint.open(again).weights_digest()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="not empty"):
        ensure_checkpoint(tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def variant(checkpoint: Path, tmp_path: Path, change: dict[str, Any]) -> Path:
    """The checkpoint with another configuration; None removes a key."""
    folder = tmp_path / "variant"
    shutil.copytree(checkpoint, folder)
    config = {**json.loads((folder / "config.json").read_text()), **change}
    (folder / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return folder
