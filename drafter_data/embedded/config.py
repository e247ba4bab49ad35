"""The parts of a Llama config.json that the forward pass needs, checked: what it does not compute is refused, never ignored."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from data_contracts.identity import StateDtype
from drafter_data.checkpoints import Checkpoint
from drafter_data.errors import InputError

_DTYPES: dict[str, StateDtype] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama model. `dtype` is the dtype that states are dumped in: the one that config.json names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    inverse_frequencies: tuple[float, ...]
    dtype: StateDtype
    eos_ids: tuple[int, ...]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> LlamaConfig:
        """Reads a checkpoint's configuration. Raises InputError (`model-unsupported`) for what `llama.py` does not compute."""
        config = checkpoint.text_config
        for name, expected in (
            ("model_type", "llama"),
            ("hidden_act", "silu"),
            ("attention_bias", False),
            ("mlp_bias", False),
            ("pretraining_tp", 1),
        ):
            found = config.get(name, expected)
            if found != expected:
                raise _unsupported(checkpoint, f"{name} {found!r}", f"{name} {expected!r}")
        if checkpoint.quantisation is not None:
            raise _unsupported(checkpoint, f"quantisation {checkpoint.quantisation}", "unquantised weights")
        try:
            heads = int(config["num_attention_heads"])
            head_dim = int(config.get("head_dim") or checkpoint.hidden_size // heads)
            return cls(
                vocab_size=checkpoint.vocab_size,
                hidden_size=checkpoint.hidden_size,
                intermediate_size=int(config["intermediate_size"]),
                num_layers=checkpoint.num_layers,
                num_heads=heads,
                num_kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=head_dim,
                rms_norm_eps=checkpoint.rms_norm_eps,
                max_positions=int(config.get("max_position_embeddings", 2048)),
                inverse_frequencies=tuple(_inverse_frequencies(checkpoint, config, head_dim).tolist()),
                dtype=_DTYPES[str(config.get("dtype") or config.get("torch_dtype") or "float32")],
                eos_ids=_ids(config.get("eos_token_id")),
            )
        except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            raise _unsupported(
                checkpoint, f"{type(error).__name__} {error}", "a complete Hugging Face Llama configuration"
            ) from error


def _ids(found: object) -> tuple[int, ...]:
    if isinstance(found, list):
        return tuple(int(i) for i in cast("list[int]", found))
    return () if found is None else (int(cast("int", found)),)


def _inverse_frequencies(checkpoint: Checkpoint, config: dict[str, Any], head_dim: int) -> NDArray[np.float64]:
    """Inverse RoPE frequencies [D/2] (Su et al. 2021), with Llama 3's scaling where asked for.

    transformers 5 writes `rope_parameters`, older releases `rope_theta` and `rope_scaling`.
    """
    scaling: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    if float(scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))) != 1.0:
        raise _unsupported(checkpoint, "a partial rotary factor", "RoPE over the whole head")
    frequencies = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind == "default":
        return frequencies
    if kind != "llama3":
        raise _unsupported(checkpoint, f"RoPE scaling {kind!r}", "'default' or 'llama3'")
    return _llama3_scaled(frequencies, scaling)


def _llama3_scaled(frequencies: NDArray[np.float64], scaling: dict[str, Any]) -> NDArray[np.float64]:
    """Llama 3.1's long-context rule: short waves stay, long ones are divided by `factor`, those between are interpolated."""
    factor, low, high = (float(scaling[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = float(scaling["original_max_position_embeddings"]) * frequencies / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - share) * frequencies / factor + share * frequencies


def _unsupported(checkpoint: Checkpoint, found: str, expected: str) -> InputError:
    return InputError(
        f"{checkpoint.folder}: the embedded engine computes plain Llama models; expected {expected}, found {found}; "
        "use SGLang or vLLM for this model",
        reason="model-unsupported",
    )
