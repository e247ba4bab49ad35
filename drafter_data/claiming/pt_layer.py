"""One layer of an older dump as `torch.save` left it: read with `weights_only=True`, which runs no code from the file.

Tensor legend: T rows of a pass, H hidden size.
"""

from __future__ import annotations

import os
from typing import Any

from numpy.typing import NDArray

from drafter_data.errors import PreflightRefused
from drafter_data.safetensors_file import MalformedFile, TensorEntry

TENSOR = "hidden_states"
_NAMES = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}


class PtLayer:
    """A layer's states, with the part of TensorFile's face that claiming uses."""

    def __init__(self, name: str, states_th: NDArray[Any], dtype: str) -> None:
        self.name = name
        self.tensors = {TENSOR: TensorEntry(dtype, states_th.shape, 0, states_th.nbytes)}
        self._states_th = states_th

    @classmethod
    def of_descriptor(cls, descriptor: int, name: str) -> PtLayer:
        """Reads a file that holds a tensor [T, H], or a dict with it under `hidden_states`.

        Raises MalformedFile (also while the file is being written), or PreflightRefused where torch is not installed.
        """
        try:
            import torch
        except ModuleNotFoundError as error:
            raise PreflightRefused(
                f"{name}: dumps in .pt files need torch: install the extra (`pip install drafter-data[torch]`), or let the patch "
                "write safetensors",
                reason="torch-missing",
            ) from error
        with os.fdopen(os.dup(descriptor), "rb") as handle:
            try:
                found: Any = torch.load(handle, map_location="cpu", weights_only=True)
            except Exception as error:  # torch raises whatever its unpickler or its archive reader meets
                raise MalformedFile(f"{name}: no whole torch file ({type(error).__name__})") from error
        states: Any = found.get(TENSOR) if isinstance(found, dict) else found
        dtype = _NAMES.get(str(getattr(states, "dtype", "")))
        if not isinstance(states, torch.Tensor) or dtype is None or states.dim() != 2:
            raise MalformedFile(f"{name}: expected one tensor [tokens, hidden] of floats")
        states = states.contiguous()
        return cls(name, (states.view(torch.uint16) if dtype == "BF16" else states).numpy(), dtype)

    def array(self, _name: str) -> NDArray[Any]:
        """The states [T, H] in storage form (bfloat16 as uint16)."""
        return self._states_th

    def close(self) -> None:
        """Nothing is open."""

    def __enter__(self) -> PtLayer:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""
