"""What SpecForge reads beside the samples: a target folder with an index, a draft configuration, a YAML file, a vocabulary map.

Read from specforge 0.2.0: config/schema.py, modeling/target/target_head.py (an `*.index.json` in the target folder), the draft
model's `load_vocab_mapping` (`{"d2t": offsets int64 [D], "t2d": bool [V]}`).
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_contracts.handoff import HandoffManifest
from drafter_data.checkpoints import Checkpoint
from drafter_data.files import atomic_path, write_atomic
from drafter_data.safetensors_file import TensorFile
from drafter_data.trainers.verifier_norm import require_torch
from drafter_data.trainers.vocabulary import draft_vocabulary

_INDEX = "model.safetensors.index.json"
_COPIED_FIELDS = (
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)


def write_target(folder: Path, model: Checkpoint) -> Path:
    """The verifier's folder where it has an index; else `folder` with links to its files and an index made from their headers."""
    if list(model.folder.glob("*.index.json")):
        return model.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)  # what a killed hand-off left half made
    folder.mkdir()
    weight_map: dict[str, str] = {}
    for path in sorted(model.folder.iterdir()):
        (folder / path.name).symlink_to(os.path.relpath(path.resolve(), folder.resolve()))
    total = 0
    for path in model.weight_files():
        with TensorFile.open(path) as file:
            weight_map |= dict.fromkeys(file.tensors, path.name)
            total += sum(entry.end - entry.start for entry in file.tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_atomic(folder / _INDEX, json.dumps(index, indent=2))
    return folder


def draft_config(model: Checkpoint, draft_vocab_size: int | None) -> dict[str, Any]:
    """An EAGLE-3 draft of one layer with the verifier's sizes."""
    text = model.text_config
    config = {name: text[name] for name in _COPIED_FIELDS if text.get(name) is not None}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **config,
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": model.vocab_size,
        "draft_vocab_size": draft_vocab_size or model.vocab_size,
    }


def write_vocab_mapping(path: Path, counts_v: NDArray[np.int64], draft_vocab_size: int) -> None:
    """`{"d2t": int64 [D], "t2d": bool [V]}` as a torch file."""
    torch, _ = require_torch()
    d2t_d, t2d_v = draft_vocabulary(counts_v, draft_vocab_size)
    with atomic_path(path) as temporary, temporary.open("wb") as handle:
        torch.save({"d2t": torch.from_numpy(d2t_d), "t2d": torch.from_numpy(t2d_v)}, handle)


def yaml_config(manifest: HandoffManifest, folder: Path, target: Path, *, aux_layers: tuple[int, ...], mapped: bool) -> str:
    """The run's YAML. `folder` is the hand-off's final place; the trainer's own settings are defaults that a user edits."""
    model = {
        "target_model_path": str(target),
        "draft_model_config": str(folder / "draft_config.json"),
        # SpecForge counts outputs of layers, Hugging Face inputs: output of layer i is hidden_states[i + 1].
        "aux_hidden_state_layer_ids": [layer - 1 for layer in aux_layers],
        "torch_dtype": "bfloat16",
    }
    if mapped:
        model["vocab_mapping_path"] = str(folder / "vocab_mapping" / "vocab_mapping.pt")
    sections: dict[str, dict[str, Any]] = {
        "model": model,
        "data": {
            "hidden_states_path": str(folder / "train"),
            "max_length": manifest.longest_tokens,
            "cache_dir": str(folder / "cache"),
        },
        "training": {"strategy": "eagle3", "log_interval": 1},
        "deployment": {"mode": "local_colocated"},
    }
    lines = ["# Written by drafter-data; every value can be overridden on the command line as section.name=value."]
    for name, values in sections.items():
        lines.append(f"{name}:")
        lines += [f"  {key}: {json.dumps(value)}" for key, value in values.items()]  # JSON values are YAML values
    lines += [f"run_id: {RUN_ID}", f"output_dir: {json.dumps(str(folder / 'checkpoints'))}"]
    return "\n".join(lines) + "\n"


RUN_ID = "drafter"
