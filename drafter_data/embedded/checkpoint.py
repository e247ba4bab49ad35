"""A small Llama checkpoint made from a seed: what the embedded engine serves when no model is named.

Scales are chosen, not trained. The residual stream is led by the token's embedding, so that a linear drafter has something to find
from the states before and the next embedding, while attention and MLP add enough context that it does not find all; the output
head is sharp enough (about 2 nats a token at temperature 0.8, out of ln 1024 = 6.9) that sampled text has structure, and flat
enough that it does not loop.

Tensor legend: H hidden, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drafter_data.checkpoints import Checkpoint
from drafter_data.errors import InputError
from drafter_data.files import fsync_folder, temporary_name

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
    "torch_dtype": "float32",
}
_BRANCH_SCALE = 0.25
_LOGIT_SCALE = 3.6


def ensure_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Makes the seed's checkpoint at `folder` unless it is there, whole or not at all, and returns `folder`.

    Raises InputError when `folder` holds something else.
    """
    if (folder / "config.json").is_file():
        _check_is_ours(folder, seed)
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty and no checkpoint; name another model folder", reason="model-folder-taken")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(temporary_name(folder.name))
    temporary.mkdir()
    try:
        _write(temporary, seed)
        temporary.replace(folder)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        if not (folder / "config.json").is_file():  # else another process was first
            raise
    fsync_folder(folder.parent)
    return folder


def _check_is_ours(folder: Path, seed: int) -> None:
    found = Checkpoint.open(folder).config.get("drafter_data_seed")
    if found != seed:
        what = "another model" if found is None else f"that of seed {found}"
        raise InputError(
            f"{folder}: expected the checkpoint of seed {seed}, found {what}; name another model folder",
            reason="model-folder-taken",
        )


def _write(folder: Path, seed: int) -> None:
    config = {**CONFIG, "drafter_data_seed": seed}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _copy_tokenizer(folder)
    tensors = dict(_tensors(np.random.default_rng(seed)))
    content = hashlib.blake2b(digest_size=20)
    for array in tensors.values():
        content.update(np.ascontiguousarray(array).data)
    # The weights digest of a store's identity reads headers only: with this, another seed's model is another model to it.
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "blake2b": content.hexdigest()}}
    position = 0
    for name, array in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [position, position + array.nbytes]}
        position += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(len(text) + -len(text) % 8)
    with (folder / "model.safetensors").open("wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            handle.write(np.ascontiguousarray(array).data)
        handle.flush()
        os.fsync(handle.fileno())
    fsync_folder(folder)


def _tensors(rng: np.random.Generator) -> Iterator[tuple[str, NDArray[np.float32]]]:
    hidden, width, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    query, kv = CONFIG["num_attention_heads"] * CONFIG["head_dim"], CONFIG["num_key_value_heads"] * CONFIG["head_dim"]

    def normal(rows: int, columns: int, gain: float) -> NDArray[np.float32]:
        return (rng.standard_normal((rows, columns)) * gain / np.sqrt(columns)).astype(np.float32)

    def norm_weight() -> NDArray[np.float32]:
        return rng.uniform(0.6, 1.4, hidden).astype(np.float32)

    yield "model.embed_tokens.weight", rng.standard_normal((vocab, hidden)).astype(np.float32)
    for index in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        yield prefix + "input_layernorm.weight", norm_weight()
        yield prefix + "self_attn.q_proj.weight", normal(query, hidden, 1.5)
        yield prefix + "self_attn.k_proj.weight", normal(kv, hidden, 1.5)
        yield prefix + "self_attn.v_proj.weight", normal(kv, hidden, 1.0)
        yield prefix + "self_attn.o_proj.weight", normal(hidden, query, _BRANCH_SCALE)
        yield prefix + "post_attention_layernorm.weight", norm_weight()
        yield prefix + "mlp.gate_proj.weight", normal(width, hidden, 1.0)
        yield prefix + "mlp.up_proj.weight", normal(width, hidden, 1.0)
        yield prefix + "mlp.down_proj.weight", normal(hidden, width, _BRANCH_SCALE)
    yield "model.norm.weight", norm_weight()
    yield "lm_head.weight", normal(vocab, hidden, _LOGIT_SCALE)


def _copy_tokenizer(folder: Path) -> None:
    """A checkpoint folder with its tokenizer is one that any Hugging Face tool opens."""
    try:
        from drafter_data.tokenising.builtin import BuiltinTokenizer
    except ImportError:
        return
    for path in sorted(BuiltinTokenizer().folder.iterdir()):
        if path.suffix in (".json", ".jinja"):
            shutil.copyfile(path, folder / path.name)
