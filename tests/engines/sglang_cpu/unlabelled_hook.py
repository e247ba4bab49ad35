"""Tests only: leaves dumps in the form of older patches, from a real SGLang. Loaded by the server through --forward-hooks.

Per forward PASS, of whatever is in it (also health checks, other clients and decode steps): `req_<counter>/` under its final name,
in it `layer_<Hugging Face index>.safetensors` (or .pt) for each layer, the final state before the norm last, and then `meta.json`.
"""

import itertools
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

_numbers = itertools.count()
_before_norm = []


def final_norm(config):
    def hook(module, args, output):
        before_th = output[1] if isinstance(output, tuple) else args[0]
        _before_norm[:] = [before_th.clone()]

    return hook


def logits(config):
    folder, layers = Path(config["dump_folder"]), config["layers"]

    def hook(module, args, output):
        aux, rows = args[4], args[1].shape[0]
        columns = list(aux) if isinstance(aux, (list, tuple)) else list(aux.split(args[1].shape[-1], dim=-1))
        target = folder / f"req_{next(_numbers):08d}"
        target.mkdir()
        for layer, states_th in zip(layers, [*columns, *_before_norm], strict=True):
            if config.get("suffix") == "pt":
                torch.save(states_th.contiguous(), target / f"layer_{layer}.pt")
            else:
                save_file({"hidden_states": states_th.contiguous()}, target / f"layer_{layer}.safetensors")
        (target / "meta.json").write_text(json.dumps({"num_tokens": rows, "final_norm": "pre"}))

    return hook
