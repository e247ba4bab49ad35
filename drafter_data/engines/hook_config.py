"""What a running SGLang says about our capture: its `/server_info` repeats the launch argument `--forward-hooks`.

`capture_hooks` is the other direction: the value of that argument. Both sides are kept together so that they cannot drift apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from data_contracts.dump import DUMP_VERSION
from data_contracts.identity import FinalNorm
from drafter_data.errors import PreflightRefused

MODULE = "sglang_hook"
"""The hook's module name inside the server: its folder is on PYTHONPATH (see launch_sglang.py)."""

CaptureVia = Literal["aux", "input_layernorm", "plugin"]
"""Where the aux states come from: the engine's own (`aux`), or the layers' input norms, for models without aux support."""


@dataclass(frozen=True)
class HookConfig:
    """The capture's configuration inside the server. `layers` are Hugging Face indices, the final one last."""

    dump_folder: str
    layers: tuple[int, ...]
    final_norm: FinalNorm = "pre"
    via: CaptureVia = "aux"
    version: int = DUMP_VERSION

    @property
    def stored_layers(self) -> int:
        """L, the second dimension of `hidden_states`."""
        return len(self.layers)


def hook_of(server_info: Mapping[str, Any]) -> HookConfig | None:
    """The capture that the server was started with, or None when it has none of ours.

    That a hook is listed does not mean that it is called (a pattern may match no module): only an acknowledged request shows it.
    Raises PreflightRefused (`hook-config-invalid`) when it is there and cannot be understood.
    """
    specs: list[Any] = server_info.get("forward_hooks") or []
    if isinstance(specs, str):
        specs = json.loads(specs)
    for spec in specs:
        factory = str(spec.get("hook_factory", ""))
        module, _, function = factory.rpartition(":")
        if module.rpartition(".")[2] in (MODULE, "sglang_plugin") and function in ("logits", "configuration"):
            return _parse(spec.get("config") or {})
    return None


def refuse_unusable(server_info: Mapping[str, Any], hook: HookConfig) -> None:
    """Raises PreflightRefused (`launch-flags`) for launch flags with which the capture sees nothing or other layers."""
    for problem in _problems(server_info, hook):
        raise PreflightRefused(
            f"the server cannot be captured from as it was started: {problem}; start it with the command that "
            "`drafter-data engine sglang --print` prints",
            reason="launch-flags",
        )


def _problems(server_info: Mapping[str, Any], hook: HookConfig) -> Iterator[str]:
    graphs = ((server_info.get("cuda_graph_config") or {}).get("prefill") or {}).get("backend", "disabled")
    if hook.via != "plugin" and graphs != "disabled":
        yield f"a prefill graph ({graphs}) replays layers without hooks: --cuda-graph-backend-prefill disabled"
    if hook.via != "input_layernorm" and hook.stored_layers > 1 and not server_info.get("enable_return_aux_hidden_states"):
        yield "no aux states: --enable-return-aux-hidden-states --speculative-algorithm EAGLE3"
    ids, aux = server_info.get("return_aux_hidden_state_layer_ids"), list(hook.layers[:-1])
    if hook.via != "input_layernorm" and server_info.get("enable_return_aux_hidden_states"):
        depth = hook.layers[-1]
        # Most families capture id i before layer i + 1, DeepSeek's takes some lists as they are; the first pass proves which.
        possible = [[2, depth // 2, depth - 3]] if ids is None else [[i + 1 for i in sorted(ids)], sorted(ids)]
        if aux not in possible:
            asked = " ".join(str(layer - 1) for layer in aux)
            yield f"its aux layer ids are {ids}, its hook says layers {aux}: --return-aux-hidden-state-layer-ids {asked}"
    for name, flag in (("pp_size", "--pp-size 1"), ("attn_cp_size", "--attn-cp-size 1")):
        if (server_info.get(name) or 1) > 1:
            yield f"{name} is {server_info[name]}, so that no rank sees all rows and layers: {flag}"
    for name in ("enable_two_batch_overlap", "enable_layernorm_sp"):
        if server_info.get(name):
            yield f"a pass is split between batches or ranks: leave out --{name.replace('_', '-')}"


def _parse(config: Mapping[str, Any]) -> HookConfig:
    version = config.get("version")
    if version != DUMP_VERSION:
        raise PreflightRefused(
            f"the server's capture hook has version {version}, expected {DUMP_VERSION}; restart the server with "
            "the command that `drafter-data engine sglang --print` prints",
            reason="hook-config-invalid",
        )
    try:
        layers = tuple(int(layer) for layer in config["layers"])
        found = HookConfig(
            dump_folder=str(config["dump_folder"]),
            layers=layers,
            final_norm=cast(FinalNorm, config.get("final_norm", "pre")),
            via=cast(CaptureVia, config.get("via", "aux")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PreflightRefused(
            f"the server's --forward-hooks configuration cannot be read ({type(error).__name__}: {error}): {dict(config)}",
            reason="hook-config-invalid",
        ) from error
    return found


def capture_hooks(config: HookConfig) -> list[dict[str, Any]]:
    """The value of `--forward-hooks` for this capture, as JSON data.

    One hook at the final norm (nothing else in a decoder is named `norm`), one at each stored layer's input norm (its states are
    taken there, or prove the engine's own aux states on the first pass), and one at `logits_processor`, where a pass is complete.
    """
    settings = {
        "version": config.version,
        "dump_folder": config.dump_folder,
        "layers": list(config.layers),
        "final_norm": config.final_norm,
        "via": config.via,
    }
    if config.via == "plugin":
        return [_hook("drafter-data", "logits_processor", "sglang_plugin:configuration", settings)]
    hooks = [_hook("drafter-data final norm", "*.norm", f"{MODULE}:final_norm", settings)]
    for layer in config.layers[:-1]:
        pattern = f"*.layers.{layer}.input_layernorm"
        hooks.append(_hook(f"drafter-data layer {layer}", pattern, f"{MODULE}:layer_input", {**settings, "layer": layer}))
    return [*hooks, _hook("drafter-data", "logits_processor", f"{MODULE}:logits", settings)]


def _hook(name: str, pattern: str, factory: str, config: dict[str, Any]) -> dict[str, Any]:
    # Multimodal models keep the language model, and so its logits_processor, one level down.
    patterns = [pattern, f"*.{pattern}"] if pattern == "logits_processor" else [pattern]
    return {"name": name, "target_modules": patterns, "hook_factory": factory, "config": config}
