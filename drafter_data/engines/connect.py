"""From parameters to a connected engine: reads what the server says of itself and of its capture, and opens the dump folder."""

from __future__ import annotations

import hashlib
import json
import socket
from pathlib import Path
from typing import Any

from data_contracts.identity import FinalNorm, Provenance, StateDtype, StoreIdentity
from data_contracts.parameters import EngineParameters
from drafter_data.checkpoints import Checkpoint, default_layers
from drafter_data.claiming.folder import DumpFolder
from drafter_data.claiming.proof import TOP_LOGPROBS, LogprobProof
from drafter_data.engines.base import Engine, EngineInfo
from drafter_data.engines.sglang import SGLangEngine
from drafter_data.engines.sglang_http import SGLangClient
from drafter_data.errors import InputError, PreflightRefused
from drafter_data.version import code_version

MOST_IN_FLIGHT = 512
_DTYPES: dict[str, StateDtype] = {"float32": "F32", "float": "F32", "float16": "F16", "half": "F16", "bfloat16": "BF16"}


def connect(settings: EngineParameters, *, request_timeout_seconds: float) -> Engine:
    """Connects to a running engine. Raises PreflightRefused or InputError with what to change."""
    if settings.url is None:
        raise PreflightRefused("no engine URL: name one, or let the flow start the embedded engine", reason="engine-not-there")
    if settings.kind == "vllm":
        from drafter_data.engines.connect_vllm import connect_vllm

        return connect_vllm(settings, request_timeout_seconds=request_timeout_seconds)
    client = SGLangClient(settings.url, timeout_seconds=request_timeout_seconds, top_logprobs=TOP_LOGPROBS)
    server_info = client.server_info()
    capture = _capture_of(server_info)
    checkpoint = open_checkpoint(settings.model or server_info.get("model_path"))
    identity = _identity(settings, capture, checkpoint, server_info)
    labelled = settings.kind != "sglang-unlabelled" and capture.get("dumps", "labelled") == "labelled"
    if labelled and not capture:
        raise PreflightRefused(
            f"{client.url} has no capture hook (no `forward_hooks` of ours in /server_info): start it with the command that "
            "`drafter-data engine sglang --print` shows, or use kind sglang-unlabelled for an older patch",
            reason="no-capture-hook",
        )
    proof = _proof(checkpoint, identity)
    info = _engine_info(settings, client.url, server_info, checkpoint, identity, labelled=labelled, proven=proof is not None)
    folder = DumpFolder.open(_dump_folder(settings, capture))
    try:
        return SGLangEngine(client, info, folder, proof, exclusive=settings.dump_folder_mode == "exclusive")
    except BaseException:
        folder.close()
        raise


def open_checkpoint(folder: object) -> Checkpoint:
    """The verifier's checkpoint. Raises InputError when there is none: identity and proof come from it."""
    if not folder or not isinstance(folder, str):
        raise InputError("no model folder: name the verifier's Hugging Face checkpoint (engine.model)", reason="model-missing")
    return Checkpoint.open(Path(folder))


def _capture_of(server_info: dict[str, Any]) -> dict[str, Any]:
    """What the engine says of its capture: layers, final_norm, dump_folder, dumps; empty when it has none."""
    own = server_info.get("drafter_data")
    if isinstance(own, dict):
        return own
    from drafter_data.engines.hook_config import hook_of, refuse_unusable

    hook = hook_of(server_info)
    if hook is not None:
        refuse_unusable(server_info, hook)
    return {} if hook is None else {"layers": hook.layers, "final_norm": hook.final_norm, "dump_folder": hook.dump_folder}


def _dump_folder(settings: EngineParameters, capture: dict[str, Any]) -> Path:
    named = settings.dump_folder or capture.get("dump_folder")
    if not named:
        raise PreflightRefused(
            "no dump folder: name the folder that the engine dumps to (engine.dump_folder)", reason="dump-folder-missing"
        )
    engine_side = capture.get("dump_folder")
    if engine_side and Path(str(engine_side)).absolute() != Path(str(named)).absolute():
        raise PreflightRefused(
            f"the engine dumps to {engine_side}, the run reads {named}: name the engine's folder", reason="dump-folder-differs"
        )
    return Path(str(named))


def _identity(
    settings: EngineParameters, capture: dict[str, Any], checkpoint: Checkpoint, server_info: dict[str, Any]
) -> StoreIdentity:
    captured = capture.get("layers") or settings.layers or default_layers(checkpoint.num_layers)
    layers = tuple(int(layer) for layer in captured)
    if settings.layers and layers != tuple(settings.layers):
        raise PreflightRefused(
            f"the engine captures layers {layers}, the run asks for {tuple(settings.layers)} (Hugging Face indices): start "
            "the engine with the command that `drafter-data engine sglang --print` shows, or ask for its layers",
            reason="layers-differ",
        )
    if list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] != checkpoint.num_layers:
        raise PreflightRefused(
            f"layers {layers}: expected ascending, distinct Hugging Face indices that end with the final one, "
            f"{checkpoint.num_layers}",
            reason="layers-invalid",
        )
    final_norm: FinalNorm = capture.get("final_norm") or settings.final_norm
    if final_norm != settings.final_norm:
        raise PreflightRefused(
            f"the engine dumps the final state {final_norm} the norm, the run asks for {settings.final_norm}: set "
            "engine.final_norm",
            reason="final-norm-differs",
        )
    return StoreIdentity(
        weights_digest=checkpoint.weights_digest(),
        quantisation=str(server_info.get("quantization") or "") or checkpoint.quantisation,
        num_layers=checkpoint.num_layers,
        hidden_size=checkpoint.hidden_size,
        layers=layers,
        final_norm=final_norm,
        dtype=_dtype(server_info, checkpoint),
    )


def _dtype(server_info: dict[str, Any], checkpoint: Checkpoint) -> StateDtype:
    named = str(server_info.get("dtype") or "auto").removeprefix("torch.")
    if named == "auto":
        named = str(checkpoint.text_config.get("dtype") or checkpoint.text_config.get("torch_dtype") or "bfloat16")
    if named not in _DTYPES:
        raise PreflightRefused(f"the engine runs in dtype {named}: expected one of {', '.join(_DTYPES)}", reason="dtype-unknown")
    return _DTYPES[named]


def _proof(checkpoint: Checkpoint, identity: StoreIdentity) -> LogprobProof | None:
    """The proof by log-probabilities; None where lm_head cannot be read, which then allows one request in flight only."""
    try:
        return LogprobProof(checkpoint, identity.final_norm, identity.dtype)
    except InputError:
        return None


def _engine_info(
    settings: EngineParameters,
    url: str,
    server_info: dict[str, Any],
    checkpoint: Checkpoint,
    identity: StoreIdentity,
    *,
    labelled: bool,
    proven: bool,
) -> EngineInfo:
    limit = int(server_info.get("max_req_input_len") or checkpoint.text_config.get("max_position_embeddings") or 1 << 20)
    chunk = int(server_info.get("chunked_prefill_size") or 0)
    one_request_a_pass = server_info.get("prefill_max_requests") == 1 and (chunk <= 0 or chunk >= limit)
    alone = not labelled and not (one_request_a_pass and proven)
    flags = {
        name: str(server_info[name])
        for name in ("chunked_prefill_size", "prefill_max_requests", "disable_radix_cache", "attention_backend", "quantization")
        if server_info.get(name) is not None
    }
    provenance = Provenance(
        engine=settings.kind,
        engine_version=str(server_info.get("version") or ""),
        model=str(checkpoint.folder),
        host=socket.gethostname(),
        tensor_parallel=int(server_info.get("tp_size") or 1),
        flags=flags,
        code_version=code_version(),
    )
    fingerprint = hashlib.blake2b(
        json.dumps([identity.model_dump(), provenance.model_dump(exclude={"code_version"})], sort_keys=True).encode(), digest_size=8
    ).hexdigest()
    return EngineInfo(
        kind=settings.kind,
        url=url,
        identity=identity,
        provenance=provenance,
        max_prompt_tokens=min(limit, chunk) if not labelled and chunk > 0 else limit,
        in_flight_limit=1 if alone else MOST_IN_FLIGHT,
        lengths_must_differ=not labelled,
        labelled=labelled,
        fingerprint=fingerprint,
        server_info=server_info,
    )
