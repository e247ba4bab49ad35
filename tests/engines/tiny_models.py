"""Tiny random checkpoints of the families that the engines are tested with. Seeded; a few megabytes each.

The norms get random weights and the weights a large spread: with the usual initialisation a wrong norm, layer or order of rows
would hardly show.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from drafter_data.tokenising.builtin import BuiltinTokenizer

VOCABULARY = 1024
LIMIT = 4096
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False}
_DENSE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": LIMIT, "initializer_range": 0.1, **_SPECIAL,
}  # fmt: skip


def make_llama(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """8 layers, hidden 128, with the built-in tokenizer beside it: vLLM does not start without one."""
    torch.manual_seed(0)
    _save(LlamaForCausalLM(LlamaConfig(**_DENSE)), folder, dtype)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BuiltinTokenizer().folder / name, folder / name)
    return folder


def make_qwen3(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """8 layers, hidden 128, with norms on queries and keys."""
    torch.manual_seed(1)
    return _save(Qwen3ForCausalLM(Qwen3Config(**_DENSE)), folder, dtype)


def make_deepseek(folder: Path, *, kimi: bool = False) -> Path:
    """8 layers of latent attention and experts, in fp32: in bf16 random experts flip at near-ties, in every library.

    Written so that SGLang (which reads `rope_scaling`, `moe_layer_freq` and others that transformers does not write, and whose CPU
    rope is yarn only) and transformers read the same model. kv_lora_rank must differ from qk_nope_head_dim on torch_native.
    """
    torch.manual_seed(2)
    yarn = {"type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
    config = DeepseekV3Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=16, num_experts_per_tok=4,
        n_group=1 if kimi else 4, topk_group=1 if kimi else 2, routed_scaling_factor=2.827 if kimi else 2.5, norm_topk_prob=True,
        first_k_dense_replace=1, kv_lora_rank=64, q_lora_rank=48, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32,
        max_position_embeddings=2048, rms_norm_eps=1e-6, initializer_range=0.1,
        rope_parameters={"rope_theta": 50000.0, **yarn}, **_SPECIAL,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                # Far apart, so that choices between experts are seldom near-ties, which rounding decides.
                buffer.copy_(torch.randperm(len(buffer)) * (3.0 / len(buffer)))
    _save(model, folder, torch.float32)
    path = folder / "config.json"
    text = json.loads(path.read_text())
    text.pop("rope_parameters", None)
    text |= {"rope_theta": 50000.0, "rope_scaling": yarn, "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    text |= {"ep_size": 1}
    path.write_text(json.dumps(text, indent=1))
    return folder


def make_kimi(folder: Path) -> Path:
    """Kimi-K2.5's shape: a DeepSeek-V3 text model below `language_model` and a small vision tower. Its plain text model, for the
    reference, is in the folder `text`.
    """
    text_folder = make_deepseek(folder / "text", kimi=True)
    text = {**json.loads((text_folder / "config.json").read_text()), "model_type": "kimi_k2"}
    vision, weights = _kimi_vision()
    weights |= {f"language_model.{name}": tensor for name, tensor in load_file(text_folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": "float32",
        "text_config": text, "vision_config": vision,
        "media_placeholder_token_id": VOCABULARY - 1, "image_token_id": VOCABULARY - 1, "video_token_id": VOCABULARY - 2,
        "projection_hidden_size": vision["hidden_size"], "ignore_index": -100, "use_unified_vision_chunk": True,
        **_SPECIAL,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _kimi_processor(folder)
    return folder


def _save(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> Path:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder)
    return folder


def _kimi_vision() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Configuration (under SGLang's and under transformers' names) and random weights of the vision part."""
    size, wide, text = 64, 128, 128
    config: dict[str, Any] = {
        "patch_size": 14, "init_pos_emb_height": 8, "init_pos_emb_width": 8, "init_pos_emb_time": 4, "pos_emb_height": 8,
        "pos_emb_width": 8, "pos_emb_time": 4, "pos_emb_type": "divided_fixed", "num_attention_heads": 2, "num_hidden_layers": 2,
        "hidden_size": size, "intermediate_size": wide, "merge_kernel_size": [2, 2], "video_attn_type": "spatial_temporal",
        "merge_type": "sd2_tpool", "mm_projector_type": "patchmerger", "mm_hidden_size": size, "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5, "text_hidden_size": text,
    }  # fmt: skip
    config |= {f"vt_{key}": config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")}
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (size, 3, 14, 14), "vision_tower.patch_embed.proj.bias": (size,),
        "vision_tower.patch_embed.pos_emb.weight": (8, 8, size), "vision_tower.encoder.final_layernorm.weight": (size,),
        "vision_tower.encoder.final_layernorm.bias": (size,), "mm_projector.pre_norm.weight": (size,),
        "mm_projector.pre_norm.bias": (size,), "mm_projector.proj.0.weight": (4 * size, 4 * size),
        "mm_projector.proj.0.bias": (4 * size,), "mm_projector.proj.2.weight": (text, 4 * size),
        "mm_projector.proj.2.bias": (text,),
    }  # fmt: skip
    for block in range(2):
        prefix = f"vision_tower.encoder.blocks.{block}."
        matrices = {"wqkv": (3 * size, size), "wo": (size, size), "mlp.fc0": (wide, size), "mlp.fc1": (size, wide)}
        for name, (rows, columns) in matrices.items():
            shapes |= {f"{prefix}{name}.weight": (rows, columns), f"{prefix}{name}.bias": (rows,)}
        shapes |= {f"{prefix}norm{k}.{part}": (size,) for k in (0, 1) for part in ("weight", "bias")}
    return config, {name: 0.1 * torch.randn(shape) for name, shape in shapes.items()}


def _kimi_processor(folder: Path) -> None:
    """SGLang's class does not start without a processor in the checkpoint (--trust-remote-code). This one takes text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {**{f"t{i}": i for i in range(VOCABULARY - 1)}, "<|media_pad|>": VOCABULARY - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(folder / "tokenizer.json"))
    source = Path(__file__).with_name("sglang_cpu") / "tiny_kimi_processor.py"
    (folder / source.name).write_text(source.read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    auto_map = {"AutoProcessor": "tiny_kimi_processor.TinyKimiProcessor"}
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "TinyKimiProcessor", "auto_map": auto_map}))
