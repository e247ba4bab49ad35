"""The folder that one forward pass leaves without labels: `meta.json`, and a file of states for each layer.

Tensor legend: S tokens, L stored layers, H hidden size.
"""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_contracts.identity import StoreIdentity
from drafter_data.claiming.folder import MAX_HEADER_BYTES, DumpFolder, open_regular
from drafter_data.claiming.pt_layer import PtLayer
from drafter_data.errors import DumpRejected
from drafter_data.foreign_file import ForeignFile
from drafter_data.safetensors_file import MalformedFile

TENSOR = "hidden_states"
MAX_META_BYTES = 1 << 16


def complete_tokens(folder: DumpFolder, name: str, identity: StoreIdentity) -> tuple[int | None, str]:
    """The pass's token count when every layer's file is whole; None while the folder is being written, -1 when it never can be.
    And what is wrong, where something is.
    """
    try:
        descriptor = folder.open_subfolder(name)
    except (FileNotFoundError, DumpRejected) as error:
        return -1, str(error)
    try:
        meta = _read_meta(descriptor)
        if meta is None:
            return None, f"{name} has no meta.json"
        tokens = int(str(meta["num_tokens"]))
        if meta.get("final_norm", identity.final_norm) != identity.final_norm:
            return -1, f"{name}: final state {meta['final_norm']!s:.20} the norm, expected {identity.final_norm}"
        for layer in identity.layers:
            with _open_layer(descriptor, layer, tokens * identity.hidden_size * 4) as file:
                if file.tensors[TENSOR].shape != (tokens, identity.hidden_size):
                    # It may be replaced by a newer version, so it is looked at again.
                    return None, f"{name}/{file.name}: {file.tensors[TENSOR].shape}, meta.json says {tokens} tokens"
        return tokens, ""
    except (FileNotFoundError, MalformedFile, ValueError, KeyError) as error:
        return None, f"{name}: {error}"
    except (DumpRejected, TypeError) as error:
        return -1, str(error)
    finally:
        os.close(descriptor)


def read_pass(folder: DumpFolder, name: str, identity: StoreIdentity, tokens: int) -> tuple[NDArray[Any], str]:
    """The layers of a complete dump as [S, L, H], and their dtype.

    Raises FileNotFoundError, MalformedFile or DumpRejected where it is not (any more) what it was when it was complete.
    """
    descriptor = folder.open_subfolder(name)
    try:
        states_slh: NDArray[Any] = np.empty(0)
        dtype = ""
        for place, layer in enumerate(identity.layers):
            with _open_layer(descriptor, layer, tokens * identity.hidden_size * 4) as file:
                layer_sh = file.array(TENSOR)
                if not place:
                    dtype = file.tensors[TENSOR].dtype
                    states_slh = np.empty((tokens, len(identity.layers), identity.hidden_size), layer_sh.dtype)
                if layer_sh.shape != (tokens, identity.hidden_size) or file.tensors[TENSOR].dtype != dtype:
                    raise MalformedFile(
                        f"{name}/{file.name}: {layer_sh.dtype} {layer_sh.shape}, expected {dtype} of {tokens} tokens"
                    )
                states_slh[:, place] = layer_sh
        return states_slh, dtype
    finally:
        os.close(descriptor)


def _read_meta(folder_descriptor: int) -> dict[str, object] | None:
    try:
        descriptor = open_regular("meta.json", folder_descriptor)
    except FileNotFoundError:
        return None
    try:
        found = json.loads(os.read(descriptor, MAX_META_BYTES))
        return found if isinstance(found, dict) else None
    except (ValueError, RecursionError):
        return None
    finally:
        os.close(descriptor)


def _open_layer(folder_descriptor: int, layer: int, most_bytes: int) -> ForeignFile | PtLayer:
    """A layer's file, safetensors or, from patches older still, .pt. Raises FileNotFoundError when neither is there."""
    name = f"layer_{layer}.safetensors"
    try:
        descriptor = open_regular(name, folder_descriptor)
    except FileNotFoundError:
        return _open_pt_layer(folder_descriptor, f"layer_{layer}.pt", most_bytes)
    file = ForeignFile(descriptor, name, MAX_HEADER_BYTES, most_bytes)
    if set(file.tensors) != {TENSOR}:
        file.close()
        raise MalformedFile(f"{name}: expected the tensor {TENSOR}, found {sorted(file.tensors)[:4]}")
    return file


def _open_pt_layer(folder_descriptor: int, name: str, most_bytes: int) -> PtLayer:
    descriptor = open_regular(name, folder_descriptor)
    try:
        size = os.fstat(descriptor).st_size
        if size > most_bytes + MAX_HEADER_BYTES:
            raise MalformedFile(f"{name}: {size} bytes, expected at most {most_bytes} and a header")
        return PtLayer.of_descriptor(descriptor, name)
    finally:
        os.close(descriptor)
