"""The independent reference: transformers' own forward pass, one prompt at a time.

Tensor legend: S tokens, L stored layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM


class Reference:
    """`hidden_states[i]` of the aux layers and the input of the final norm, as float32."""

    def __init__(self, model: Path, dtype: torch.dtype = torch.float32) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        self._before_norm: torch.Tensor | None = None
        self._model.model.norm.register_forward_pre_hook(self._keep)

    def _keep(self, _: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self._before_norm = args[0]

    def states(self, token_ids: Sequence[int], layers: Sequence[int]) -> NDArray[np.float32]:
        """States [S, L, H] of the layers, the last of which is the final one, before its norm."""
        with torch.inference_mode():
            found = self._model(torch.tensor([list(token_ids)]), output_hidden_states=True, use_cache=False)
        assert self._before_norm is not None
        columns = [found.hidden_states[layer][0] for layer in layers[:-1]]
        return torch.stack([*columns, self._before_norm[0]], dim=1).float().numpy()
