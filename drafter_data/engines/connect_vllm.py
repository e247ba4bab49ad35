"""From parameters to a connected vLLM. It says little of itself, so one short prompt shows what it writes."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np

from data_contracts.identity import Provenance, StateDtype, StoreIdentity
from data_contracts.parameters import EngineParameters
from drafter_data.checkpoints import Checkpoint, default_layers
from drafter_data.claiming.folder import DumpFolder
from drafter_data.claiming.proof import TOP_LOGPROBS
from drafter_data.engines.base import Engine, EngineInfo, PrefillRequest
from drafter_data.engines.vllm import VllmEngine
from drafter_data.engines.vllm_http import VllmClient
from drafter_data.errors import DrafterDataError, InputError, PreflightRefused
from drafter_data.version import code_version

MOST_IN_FLIGHT = 512
PROBE_TOKENS = 8
PROBE_SECONDS = 60.0
_COMMAND = "start it with the command that `drafter-data engine vllm --print` prints"


def connect_vllm(settings: EngineParameters, *, request_timeout_seconds: float) -> Engine:
    """Connects to a running vLLM. Raises PreflightRefused or InputError with what to change."""
    assert settings.url is not None
    client = VllmClient(settings.url, timeout_seconds=request_timeout_seconds, top_logprobs=TOP_LOGPROBS)
    served = client.served_model()
    named = settings.model or served.get("root")
    if not named:
        raise InputError("no model folder: name the verifier's Hugging Face checkpoint (engine.model)", reason="model-missing")
    checkpoint = Checkpoint.open(Path(str(named)))
    layers = tuple(settings.layers or default_layers(checkpoint.num_layers))
    if list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] != checkpoint.num_layers:
        raise PreflightRefused(
            f"layers {layers}: expected ascending, distinct Hugging Face indices that end with {checkpoint.num_layers}",
            reason="layers-invalid",
        )
    if settings.final_norm != "pre":
        raise PreflightRefused(
            "vLLM writes the final state before the norm: set engine.final_norm to pre", reason="final-norm-differs"
        )
    if not settings.dump_folder:
        raise PreflightRefused(
            "no dump folder: name the folder that vLLM writes to (shared_storage_path in --kv-transfer-config)",
            reason="dump-folder-missing",
        )
    folder = DumpFolder.open(Path(settings.dump_folder))
    return _probed(client, served, checkpoint, layers, folder)


def _probed(
    client: VllmClient,
    served: dict[str, Any],
    checkpoint: Checkpoint,
    layers: tuple[int, ...],
    folder: DumpFolder,
) -> VllmEngine:
    identity = StoreIdentity(
        weights_digest=checkpoint.weights_digest(),
        quantisation=checkpoint.quantisation,
        num_layers=checkpoint.num_layers,
        hidden_size=checkpoint.hidden_size,
        layers=layers,
        final_norm="pre",
        dtype="F32",
    )
    try:
        draft = VllmEngine(client, _info(client, served, checkpoint, identity), folder)
    except BaseException:
        folder.close()
        raise
    try:  # from here on the engine closes the folder
        dtype = _written_dtype(draft, layers, checkpoint)
    except BaseException:
        draft.close()
        raise
    known = identity.model_copy(update={"dtype": dtype})
    return draft.describing(_info(client, served, checkpoint, known))


def _written_dtype(engine: VllmEngine, layers: tuple[int, ...], checkpoint: Checkpoint) -> StateDtype:
    """The dtype of what vLLM writes for a short prompt, whose shape is checked on the way."""
    first = min(16, checkpoint.vocab_size - PROBE_TOKENS)
    ids_s = np.arange(first, first + PROBE_TOKENS, dtype=np.int64)
    request = PrefillRequest(engine.new_request_id(), "probe", ids_s)
    try:
        reply = engine.send(request)
        dump = engine.claim(request, reply, time.monotonic() + PROBE_SECONDS)
    except DrafterDataError as error:
        engine.abandon(request)
        hint = f"; expected layers {layers} ({_COMMAND})" if error.reason == "shape" else ""
        raise PreflightRefused(f"a probe of {PROBE_TOKENS} tokens failed: {error}{hint}", reason=f"probe-{error.reason}") from error
    dtype = dump.dtype
    engine.release(dump)
    if dtype not in ("F32", "F16", "BF16"):
        raise PreflightRefused(f"vLLM writes states of dtype {dtype}: expected F32, F16 or BF16", reason="dtype-unknown")
    return dtype


def _info(client: VllmClient, served: dict[str, Any], checkpoint: Checkpoint, identity: StoreIdentity) -> EngineInfo:
    provenance = Provenance(
        engine="vllm",
        engine_version=client.version(),
        model=str(checkpoint.folder),
        host=socket.gethostname(),
        flags={"max_model_len": str(served["max_model_len"])},
        code_version=code_version(),
    )
    parts = [identity.model_dump(), provenance.model_dump(exclude={"code_version"})]
    return EngineInfo(
        kind="vllm",
        url=client.url,
        identity=identity,
        provenance=provenance,
        # A prompt of max_model_len leaves no room for one new token and is refused.
        max_prompt_tokens=int(served["max_model_len"]) - 1,
        in_flight_limit=MOST_IN_FLIGHT,
        lengths_must_differ=False,
        labelled=True,
        fingerprint=hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest(),
        server_info={"model_path": served.get("root")},
    )
