"""Hidden states by transformers: the independent reference. S tokens, L layers, H hidden size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


class ReferenceModel:
    """A Llama checkpoint in transformers, fp32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._before_norm: list[object] = []
        self._model.model.norm.register_forward_pre_hook(lambda _module, inputs: self._before_norm.append(inputs[0]))

    def states(self, ids: Sequence[int], layers: Sequence[int]) -> NDArray[np.float32]:
        """`hidden_states[i]` for the aux layers and the input of the final norm for the last of `layers`: [S, L, H]."""
        self._before_norm.clear()
        with self._torch.no_grad():
            out = self._model(self._torch.tensor([list(ids)]), output_hidden_states=True)
        columns = [out.hidden_states[layer][0] for layer in layers[:-1]] + [self._before_norm[-1][0]]
        return self._torch.stack(columns, dim=1).numpy()
