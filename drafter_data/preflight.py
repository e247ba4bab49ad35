"""Preflight: refuses in seconds what would fail after hours."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_contracts.identity import StoreIdentity
from data_contracts.parameters import ExtractionParameters
from data_contracts.preflight import CanaryRecord, PreflightReport
from drafter_data.canary import Canary, tokens_of_canary
from drafter_data.checkpoints import Checkpoint
from drafter_data.costs import CostModel, costs_path
from drafter_data.dataset import Dataset
from drafter_data.engines.base import Engine, EngineInfo
from drafter_data.errors import InputError, PreflightRefused
from drafter_data.extraction.tuning import first_in_flight
from drafter_data.files import existing_parent
from drafter_data.probing import burst_lengths, send_burst
from drafter_data.store.store import RECORD_FILE, Store

PROBE_QUANTILES = (0.05, 0.3, 0.55, 0.8, 0.97)


def run_preflight(
    engine: Engine,
    dataset: Dataset,
    store_root: Path,
    extraction: ExtractionParameters,
    *,
    keep_free_bytes: int = 0,
    seed: int = 0,
) -> PreflightReport:
    """Checks settings, space and identity, sends the canary, opens (or makes) the store and keeps the probes' cost history.

    Raises PreflightRefused, IdentityMismatch or InputError with what to change; then nothing was written.
    """
    info = engine.describe()
    to_come_n = tokens_to_come(dataset, store_root, info.identity, info.max_prompt_tokens)
    check_free(store_root, int(to_come_n.sum()) * info.identity.bytes_per_token, keep_free_bytes)
    lengths = _lengths(dataset, info)
    checkpoint = Checkpoint.open(Path(info.provenance.model))
    _check_model(info, checkpoint)
    costs = CostModel.load(costs_path(store_root, info.fingerprint))
    _check_dump_folder(engine, info, int(lengths.max()))
    swept = engine.sweep()
    canary = Canary(engine, checkpoint, dump_timeout_seconds=extraction.dump_timeout_seconds, seed=seed)
    bound = min(extraction.in_flight, info.in_flight_limit)
    in_flight = first_in_flight(to_come_n, bound, costs.found_for(to_come_n, bound))
    longest = int(lengths.max())
    burst = [] if costs.tells_of(in_flight) else burst_lengths(to_come_n, in_flight, spent_tokens=tokens_of_canary(longest))
    probes = [int(value) for value in np.quantile(lengths, PROBE_QUANTILES)]
    figures = canary.run([] if burst else probes, longest, costs)
    sent = send_burst(canary, engine, burst, in_flight, costs) if burst else None
    if burst and sent is None:  # one prompt alone would say nothing of other lengths, by which the plan is cut
        canary.observe(probes, costs)
    figures = figures.model_copy(update={"requests": len(canary.sent)})
    store = Store.open(store_root, info.identity)
    try:
        store.record_canary(CanaryRecord(engine=info.kind, fingerprint=info.fingerprint, figures=figures))
        notes = _notes(info, swept, dataset, lengths, store.record_provenance(info.provenance))
        if canary.repeated:
            notes.append(f"{len(canary.repeated)} canary requests had to be repeated: {', '.join(sorted(set(canary.repeated)))}")
        if sent is not None:
            notes.append(
                f"nothing known of this engine with {in_flight} in flight: {len(sent.lengths)} probes of {sum(sent.lengths):,} "
                f"tokens at once took {sent.seconds:.1f} s"
            )
        costs.save(costs_path(store_root, info.fingerprint))
        return PreflightReport(
            engine=info.kind,
            url=info.url,
            fingerprint=info.fingerprint,
            identity=info.identity,
            provenance=info.provenance,
            in_flight=bound,
            first_in_flight=in_flight,
            lengths_must_differ=info.lengths_must_differ,
            max_prompt_tokens=info.max_prompt_tokens,
            bytes_per_token=info.identity.bytes_per_token,
            canary=figures,
            notes=tuple(notes),
        )
    except OSError as error:
        raise PreflightRefused(
            f"store {store_root} cannot be written to: {error.strerror}; mount it writable, with free space, or name another store",
            reason="store-not-writable",
        ) from error
    finally:
        store.close()


def _lengths(dataset: Dataset, info: EngineInfo) -> NDArray[np.int64]:
    lengths = dataset.columns("num_tokens").column("num_tokens").to_numpy().astype(np.int64)
    lengths = lengths[lengths <= info.max_prompt_tokens]
    if not len(lengths):
        raise PreflightRefused(
            f"every row of {dataset.folder} is longer than the engine's limit of {info.max_prompt_tokens} tokens: raise the "
            f"engine's context length ({'--max-model-len' if info.kind == 'vllm' else '--context-length'})",
            reason="limit-too-short",
        )
    return lengths


def _check_model(info: EngineInfo, checkpoint: Checkpoint) -> None:
    """The server's own model folder, where it can be read, must hold the weights that the run names."""
    served = info.server_info.get("model_path")
    if not isinstance(served, str) or not Path(served).is_dir():
        return
    try:
        digest = Checkpoint.open(Path(served)).weights_digest()
    except InputError:
        return  # a folder without safetensors cannot be compared; the canary's proof decides
    if digest != info.identity.weights_digest:
        raise PreflightRefused(
            f"the engine serves {served}, the run names {checkpoint.folder}, and their weights differ: start the engine with "
            f"--model-path {checkpoint.folder}, or name the served folder (engine.model)",
            reason="model-differs",
        )


def _check_dump_folder(engine: Engine, info: EngineInfo, longest: int) -> None:
    need = 2 * longest * len(info.identity.layers) * info.identity.hidden_size * 4
    free = engine.free_bytes()
    if free < need:
        raise PreflightRefused(
            f"the dump folder has {free / 1e9:.3f} GB free, two of the longest prompts ({longest} tokens) need "
            f"{need / 1e9:.3f} GB: "
            "remove left-overs, or enlarge the RAM disk",
            reason="dump-folder-full",
        )


def bytes_to_come(dataset: Dataset, store_root: Path, identity: StoreIdentity, max_prompt_tokens: int) -> int:
    """Bytes of the states that the store, which need not be there yet, lacks. Raises IdentityMismatch for another's store."""
    return int(tokens_to_come(dataset, store_root, identity, max_prompt_tokens).sum()) * identity.bytes_per_token


def tokens_to_come(dataset: Dataset, store_root: Path, identity: StoreIdentity, max_prompt_tokens: int) -> NDArray[np.int64]:
    """Lengths of the prompts that the store lacks, int64 [prompts]. Raises IdentityMismatch for another's store."""
    store = Store.open(store_root, identity) if (store_root / RECORD_FILE).is_file() else None
    try:
        columns = dataset.columns("state_key", "num_tokens")
        keys, tokens = columns.column("state_key").to_pylist(), columns.column("num_tokens").to_pylist()
        lacking = {
            key: count
            for key, count in zip(keys, tokens, strict=True)
            if count <= max_prompt_tokens and (store is None or key not in store)
        }
        return np.fromiter(lacking.values(), dtype=np.int64, count=len(lacking))
    finally:
        if store is not None:
            store.close()


def check_free(store_root: Path, to_come: int, keep_free_bytes: int) -> None:
    """Raises PreflightRefused when what is to come does not fit on the store's disk."""
    free = shutil.disk_usage(existing_parent(store_root)).free
    if free - keep_free_bytes < to_come:
        raise PreflightRefused(
            f"store {store_root}: {to_come / 1e9:.3f} GB to come, {free / 1e9:.3f} GB free of which {keep_free_bytes / 1e9:.3f} GB "
            "are to be kept: free space, name a store on a larger disk, or extract fewer samples",
            reason="disk-too-small",
        )


def _notes(
    info: EngineInfo,
    swept: int,
    dataset: Dataset,
    lengths: NDArray[np.int64],
    changed: list[str],
) -> list[str]:
    notes = [f"provenance changed since the last run: {line}" for line in changed]
    if swept:
        notes.append(f"{swept} left-over dumps of our own dead runs removed")
    if info.in_flight_limit == 1:
        notes.append(
            "unlabelled dumps: one request in flight only; start the engine with --prefill-max-requests 1 and no chunking "
            "below the longest prompt, and let the run read lm_head, to allow more"
        )
    if len(lengths) < dataset.record.rows:
        notes.append(
            f"{dataset.record.rows - len(lengths)} rows are longer than the engine's limit of {info.max_prompt_tokens} "
            "tokens: excluded"
        )
    return notes
