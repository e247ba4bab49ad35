"""Readers of earlier extractions: what speculators and SpecForge train from, and the request folders of older SGLang patches.

Nothing is unpickled: torch files are loaded with `weights_only=True`, which builds tensors and containers only.
Tensor legend: S tokens, L stored layers (aux ascending, then the final one), H hidden size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_contracts.identity import FinalNorm
from drafter_data.dataset import Dataset
from drafter_data.errors import DumpRejected, InputError
from drafter_data.safetensors_file import TensorFile
from drafter_data.trainers.arrow_dataset import read_arrow_dataset

_HIDDEN_FILE = re.compile(r"hs_(\d+)\.safetensors$")
_TORCH_DTYPES = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}


@dataclass(frozen=True)
class EarlierState:
    """States in storage form [S, L, H] (bfloat16 as uint16), and the ids that lie beside them."""

    states_slh: NDArray[Any]
    dtype: str
    token_ids_s: NDArray[np.int64] | None


@dataclass(frozen=True)
class EarlierSample:
    """One sample of an earlier extraction. `candidates` are the prompts that it may belong to: one where the source names it."""

    name: str
    candidates: Sequence[NDArray[np.int64]]
    load: Callable[[], EarlierState]


@dataclass(frozen=True)
class EarlierExtraction:
    """An earlier extraction, read lazily."""

    kind: str
    final_norm: FinalNorm
    samples: Callable[[], Iterator[EarlierSample]]


def open_speculators(folder: Path, data: Path | None) -> EarlierExtraction:
    """`hs_<row>.safetensors` anywhere below `folder`, and the Arrow dataset whose rows they are.

    Raises InputError when there is no such file, two of one row, or no dataset (a folder with state.json).
    """
    files: dict[int, Path] = {}
    for path in sorted(folder.rglob("hs_*.safetensors")):
        found = _HIDDEN_FILE.match(path.name)
        if found and files.setdefault(int(found.group(1)), path) != path:
            raise InputError(f"{path} and {files[int(found.group(1))]} are both row {found.group(1)}; name one of the folders")
    if not files:
        raise InputError(f"no hs_<row>.safetensors below {folder}", reason="adopt-nothing")
    datasets = [data] if data else sorted(path.parent for path in folder.rglob("state.json"))
    if len(datasets) != 1 or not (datasets[0] / "state.json").is_file():
        raise InputError(
            f"expected one saved dataset (a folder with state.json) below {folder}, found {len(datasets)}; name it with --data",
            reason="adopt-no-dataset",
        )

    def samples() -> Iterator[EarlierSample]:
        rows = 0
        for row, (ids_s, _) in enumerate(read_arrow_dataset(datasets[0])):
            rows += 1
            if row in files:
                yield EarlierSample(files[row].name, [ids_s.astype(np.int64)], _safetensors_loader(files[row]))
        for row in sorted(row for row in files if row >= rows):
            yield EarlierSample(files[row].name, [], _safetensors_loader(files[row]))

    return EarlierExtraction("speculators", "pre", samples)


def open_specforge(folder: Path, dataset: Dataset | None) -> EarlierExtraction:
    """`*.ckpt` anywhere below `folder`. With a dataset, only prompts that it holds are adopted."""
    paths = sorted(folder.rglob("*.ckpt"))
    if not paths:
        raise InputError(f"no .ckpt file below {folder}", reason="adopt-nothing")
    known = set(dataset.columns("state_key").column(0).to_pylist()) if dataset else None

    def samples() -> Iterator[EarlierSample]:
        from data_contracts.identity import state_key_of_bytes

        for path in paths:
            try:
                state = _load_checkpoint(path)
            except DumpRejected as error:
                yield EarlierSample(path.name, [], _raiser(error))
                continue
            ids_s = state.token_ids_s
            assert ids_s is not None
            foreign = known is not None and state_key_of_bytes(ids_s.astype("<u4").tobytes()) not in known
            yield EarlierSample(path.name, [] if foreign else [ids_s], lambda state=state: state)

    return EarlierExtraction("specforge", "post", samples)


def open_req_folders(folder: Path, dataset: Dataset | None) -> EarlierExtraction:
    """`req_<counter>/` with `layer_<index>.safetensors` and meta.json. Without ids, all prompts of their length are candidates.

    Raises InputError without a dataset, or when the folders disagree on the norm.
    """
    requests = sorted(path for path in folder.rglob("req_*") if path.is_dir())
    if not requests:
        raise InputError(f"no req_<counter> folder below {folder}", reason="adopt-nothing")
    if dataset is None:
        raise InputError("request folders carry no token ids; name the dataset that was extracted (--dataset)", reason="bad-usage")
    norms = {str(_meta(path).get("final_norm", "pre")) for path in requests}
    if norms not in ({"pre"}, {"post"}):
        raise InputError(f"{folder}: request folders of several norms ({sorted(norms)}); adopt them one by one")

    def samples() -> Iterator[EarlierSample]:
        by_length: dict[int, list[NDArray[np.int64]]] = {}
        for sample in dataset.samples():
            by_length.setdefault(sample.tokens, []).append(sample.input_ids_s.astype(np.int64))
        for path in requests:
            tokens = int(_meta(path).get("num_tokens", -1))
            yield EarlierSample(path.name, by_length.get(tokens, []), lambda path=path: _load_request(path))

    return EarlierExtraction("req-folders", "pre" if norms == {"pre"} else "post", samples)


def _raiser(error: DumpRejected) -> Callable[[], EarlierState]:
    def load() -> EarlierState:
        raise error

    return load


def _meta(folder: Path) -> Mapping[str, Any]:
    try:
        found: Any = json.loads((folder / "meta.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _safetensors_loader(path: Path) -> Callable[[], EarlierState]:
    def load() -> EarlierState:
        file = TensorFile.open(path)  # stays mapped while the arrays are used
        ids = file.array("token_ids").astype(np.int64) if "token_ids" in file.tensors else None
        return EarlierState(file.array("hidden_states"), file.tensors["hidden_states"].dtype, ids)

    return load


def _load_request(folder: Path) -> EarlierState:
    paths = sorted(folder.glob("layer_*.safetensors"), key=lambda path: int(path.stem.removeprefix("layer_")))
    if not paths:
        raise DumpRejected(f"{folder}: no layer files", reason="layers-missing")
    layers: list[NDArray[Any]] = []
    dtypes: set[str] = set()
    for path in paths:
        file = TensorFile.open(path)
        layers.append(file.array("hidden_states"))
        dtypes.add(file.tensors["hidden_states"].dtype)
    if len({layer.shape for layer in layers}) != 1 or len(dtypes) != 1:
        raise DumpRejected(f"{folder}: layers of different shapes or dtypes", reason="shape")
    return EarlierState(np.stack(layers, axis=1), dtypes.pop(), None)


def _load_checkpoint(path: Path) -> EarlierState:
    from drafter_data.trainers.verifier_norm import require_torch

    torch, _ = require_torch()
    try:
        raw = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        ids, mask, aux, final = (raw[name] for name in ("input_ids", "loss_mask", "aux_hidden_state", "hidden_state"))
        tokens, hidden = len(ids), final.shape[-1]
        aux_slh, final_slh = aux.reshape(aux.shape[-2], -1, hidden), final.reshape(-1, 1, hidden)
        if not len(mask) == tokens == len(aux_slh) == len(final_slh) or str(aux.dtype) != str(final.dtype):
            raise DumpRejected(
                f"{path.name}: {tokens} ids, {len(mask)} mask values, {len(aux_slh)} aux and {len(final_slh)} final states; "
                "expected one number",
                reason="row-count",
            )
        states = torch.cat([aux_slh, final_slh], dim=1).contiguous()
    except DumpRejected:
        raise
    except Exception as error:
        raise DumpRejected(f"{path.name}: does not load: {type(error).__name__}: {error}", reason="file-malformed") from error
    dtype = _TORCH_DTYPES.get(str(states.dtype), str(states.dtype))
    array = states.view(torch.int16).numpy().view(np.uint16) if dtype == "BF16" else states.numpy()
    return EarlierState(array, dtype, ids.numpy().astype(np.int64))
