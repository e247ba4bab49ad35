"""The exact command that starts vLLM (0.32) so that it writes hidden states to files.

vLLM's layer id N is the residual stream after N layers, that is Hugging Face's hidden_states[N], and N = n is the state BEFORE the
final norm. Its ids must be distinct and ascending: it sorts them silently, and fails at the first request otherwise.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drafter_data.checkpoints import Checkpoint
from drafter_data.engines.launch import LaunchCommand, absolute, bytes_per_token, checked_layers, option

PROGRAM_VARIABLE = "DRAFTER_DATA_VLLM"
CONNECTOR = "ExampleHiddenStatesConnector"


def vllm_command(
    model: Path,
    dump_folder: Path,
    *,
    layers: Sequence[int] | None = None,
    port: int = 8000,
    program: Sequence[str] = (),
    connector: str = CONNECTOR,
    connector_module: str | None = None,
    env: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
) -> LaunchCommand:
    """Builds the command. `layers` as for SGLang; `flags` are added at the end (`--tensor-parallel-size 8`, `--max-model-len`, …).

    `program` starts vLLM; when empty it is taken from DRAFTER_DATA_VLLM, which is how a flow is told.
    Set `--max-model-len` to the longest prompt + 1: vLLM refuses a prompt that leaves no room for one token. `connector_module`
    names a module with another connector class. Reads only the configuration. Raises InputError for layers that the model has not.
    """
    checkpoint = Checkpoint.of_config(model)
    wanted = checked_layers(checkpoint, layers)
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(wanted)}},
    }
    transfer: dict[str, Any] = {
        "kv_connector": connector,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": absolute(dump_folder)},
    }
    if connector_module is not None:
        transfer["kv_connector_module_path"] = connector_module
    argv = [
        *(program or (os.environ.get(PROGRAM_VARIABLE, "vllm"),)), "serve", absolute(model),
        "--host", "127.0.0.1",
        "--port", str(port),
        "--speculative-config", json.dumps(speculative, separators=(",", ":")),
        "--kv-transfer-config", json.dumps(transfer, separators=(",", ":")),
        *flags,
    ]  # fmt: skip
    return LaunchCommand(
        argv=tuple(argv),
        env=dict(env or {}),
        search=(),
        layers=wanted,
        bytes_per_token=bytes_per_token(checkpoint, wanted, option(flags, "--dtype")),
        facts={"dump_folder": absolute(dump_folder), "final_norm": "pre", "connector": connector},
    )
