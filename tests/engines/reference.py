"""The independent reference: transformers' own forward pass, one prompt at a time.

Tensor legend: S tokens, L stored layers, H hidden size, E experts, G groups of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM


class Reference:
    """`hidden_states[i]` of the aux layers and the input of the final norm, as float32."""

    def __init__(self, model: Path, dtype: torch.dtype = torch.float32) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        self._before_norm: torch.Tensor | None = None
        self.narrowest_choice = float("inf")
        """Of the last prompt: how little an expert's score was from being chosen or not, over all tokens and layers."""
        self._model.model.norm.register_forward_pre_hook(self._keep)
        routers = [module for module in self._model.modules() if hasattr(module, "e_score_correction_bias")]
        self.has_experts = bool(routers)
        self._kept: dict[tuple[tuple[int, ...], tuple[int, ...]], NDArray[np.float32]] = {}
        for router in routers:
            router.register_forward_pre_hook(self._look_at_choice)

    def _keep(self, _: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self._before_norm = args[0]

    def _look_at_choice(self, router: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        """DeepSeek-V3's choice (arXiv:2412.19437, 2.1.2): the best groups by their two best experts, then the best experts."""
        found: Any = router
        groups, chosen_groups, chosen = found.num_group, found.topk_group, found.top_k
        hidden_sh = args[0].reshape(-1, args[0].shape[-1])
        scores_se = (hidden_sh @ found.weight.T).sigmoid() + found.e_score_correction_bias
        scores_sge = scores_se.reshape(len(scores_se), groups, -1)
        groups_sg = scores_sge.topk(2, dim=-1).values.sum(-1)
        best_sg = groups_sg.topk(chosen_groups).indices
        left_se = scores_sge.gather(1, best_sg[..., None].expand(-1, -1, scores_sge.shape[-1])).flatten(1)
        for values, count in ((groups_sg, chosen_groups), (left_se, chosen)):
            if count < values.shape[-1]:
                ordered = values.topk(count + 1).values
                self.narrowest_choice = min(self.narrowest_choice, float((ordered[:, -2] - ordered[:, -1]).min()))

    def states(self, token_ids: Sequence[int], layers: Sequence[int]) -> NDArray[np.float32]:
        """States [S, L, H] of the layers, the last of which is the final one, before its norm."""
        if (asked := (tuple(token_ids), tuple(layers))) in self._kept:
            return self._kept[asked]
        self.narrowest_choice = float("inf")
        with torch.inference_mode():
            found = self._model(torch.tensor([list(token_ids)]), output_hidden_states=True, use_cache=False)
        assert self._before_norm is not None
        columns = [found.hidden_states[layer][0] for layer in layers[:-1]]
        states_slh = torch.stack([*columns, self._before_norm[0]], dim=1).float().numpy()
        if self.has_experts:  # slow, and asked for twice: for its choices, then for its states
            self._kept[asked] = states_slh
        return states_slh
