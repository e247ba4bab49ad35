"""The exact command that starts an unpatched SGLang (0.5.23 or later) so that it dumps hidden states."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from data_contracts.identity import FinalNorm
from drafter_data import capture
from drafter_data.checkpoints import Checkpoint
from drafter_data.engines.hook_config import CaptureVia, HookConfig, capture_hooks
from drafter_data.engines.launch import LaunchCommand, absolute, bytes_per_token, checked_layers, option

PYTHON_VARIABLE = "DRAFTER_DATA_SGLANG_PYTHON"
CAPTURE_FOLDER = Path(next(iter(capture.__path__)))

_SHIFTS_BY_FIRST_ID = ("DeepseekV2", "DeepseekV3", "DeepseekV32", "KimiK25", "GlmMoeDsa")
"""Architectures that take explicit aux layer ids as they are unless the first of them is 1: for the default set the ids are left
out, any other set is captured at the layers' input norms."""

_WITH_AUX = (
    "ApertusForCausalLM", "BailingMoEForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM", "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM", "GptOssForCausalLM", "IQuestCoderForCausalLM", "InternLM3ForCausalLM",
    "KimiK25ForConditionalGeneration", "Llama4ForConditionalGeneration", "LlamaForCausalLM", "LongcatFlashForCausalLM",
    "MiniMaxM2ForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3VLForConditionalGeneration",
)  # fmt: skip
"""Architectures whose SGLang class captures aux states (read in 0.5.23). Those whose layers scale the embeddings or add norms of
their own (Gemma) are left to `--via`, since nothing here has shown what they capture."""


def sglang_command(
    model: Path,
    dump_folder: Path,
    *,
    layers: Sequence[int] | None = None,
    final_norm: FinalNorm = "pre",
    via: CaptureVia | None = None,
    port: int = 30000,
    python: str | None = None,
    flags: Sequence[str] = (),
) -> LaunchCommand:
    """Builds the command. `layers` are Hugging Face indices (None: 2, n/2, n-3, n); `via` None picks by the model's architecture.

    `python` is the interpreter of SGLang's environment; None takes it from DRAFTER_DATA_SGLANG_PYTHON, which is how a flow is told.
    `flags` are added at the end (`--tp-size 8` and so on). Reads the model's configuration only, so it works before the weights are
    there. Raises InputError for layers that the model has not.
    """
    checkpoint = Checkpoint.of_config(model)
    wanted = checked_layers(checkpoint, layers)
    chosen = via or _way_for(checkpoint, wanted)
    hook = HookConfig(absolute(dump_folder), wanted, final_norm, chosen)
    argv = [
        python or os.environ.get(PYTHON_VARIABLE, "python3"), "-m", "sglang.launch_server",
        "--model-path", absolute(model),
        "--host", "127.0.0.1",
        "--port", str(port),
        "--skip-tokenizer-init",
        "--disable-radix-cache",
        *_graph_flags(hook),
        *_aux_flags(checkpoint, hook),
        "--forward-hooks", json.dumps(capture_hooks(hook), separators=(",", ":")),
        *flags,
    ]  # fmt: skip
    return LaunchCommand(
        argv=tuple(argv),
        env={},
        search=(str(CAPTURE_FOLDER),),
        layers=wanted,
        bytes_per_token=bytes_per_token(checkpoint, wanted, option(flags, "--dtype")),
        facts={"via": chosen, "dump_folder": hook.dump_folder, "final_norm": final_norm, "architecture": _architecture(checkpoint)},
    )


def _architecture(checkpoint: Checkpoint) -> str:
    return str((checkpoint.config.get("architectures") or [""])[0])


def _is_default(checkpoint: Checkpoint, layers: tuple[int, ...]) -> bool:
    depth = checkpoint.num_layers
    return layers == (2, depth // 2, depth - 3, depth)


def _way_for(checkpoint: Checkpoint, layers: tuple[int, ...]) -> CaptureVia:
    """The engine's own aux states where it can give these layers for sure, else the layers' input norms."""
    architecture = _architecture(checkpoint)
    if architecture not in _WITH_AUX or 0 in layers or len(layers) == 1:
        return "input_layernorm"
    if architecture.startswith(_SHIFTS_BY_FIRST_ID) and not _is_default(checkpoint, layers):
        return "input_layernorm"
    return "aux"


def _aux_flags(checkpoint: Checkpoint, hook: HookConfig) -> list[str]:
    if hook.via == "input_layernorm":
        # The fused all-reduce calls the norm's kernel without the module, which no hook sees.
        return ["--enforce-disable-flashinfer-allreduce-fusion"]
    flags = ["--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3"]
    if _is_default(checkpoint, hook.layers) and _architecture(checkpoint).startswith(_SHIFTS_BY_FIRST_ID):
        return flags
    # SGLang's id i is captured before layer i + 1, which Hugging Face calls hidden_states[i + 1].
    return [*flags, "--return-aux-hidden-state-layer-ids", *(str(layer - 1) for layer in hook.layers[:-1])]


def _graph_flags(hook: HookConfig) -> list[str]:
    """Prefill graphs replay layers without hooks; a decode graph would only cost memory, since nothing is decoded."""
    prefill = [] if hook.via == "plugin" else ["--cuda-graph-backend-prefill", "disabled"]
    return [*prefill, "--cuda-graph-backend-decode", "disabled"]
