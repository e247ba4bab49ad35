"""Layers in another order are told from a few tokens of each sample, and good samples are left alone, however many there are."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from drafter_data.embedded.checkpoint import ensure_checkpoint
from drafter_data.embedded.llama import Llama
from drafter_data.trainers.layer_signature import LayerSignatures
from tests.support.datasets import random_prompts

LAYERS = (2, 4, 5, 8)
ONCE_ALARMED = (10958, 13057, 13549, 13801, 14659, 15613)
"""Of 20,000 good samples those that a fixed limit on the misfit, which knew nothing of how samples vary, called out of order."""


@pytest.fixture(scope="module")
def tails(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NDArray[np.float32]]:
    """The last three tokens of 800 samples and of those that were once called out of order, [3, L, H] each."""
    model = Llama.load(ensure_checkpoint(tmp_path_factory.mktemp("model") / "model"))
    prompts = random_prompts(20_000, 8, 48, seed=0)
    return {str(n): model.forward(np.array(prompts[n]), LAYERS)[-3:].astype(np.float32) for n in (*range(800), *ONCE_ALARMED)}


def found_among(tails: dict[str, NDArray[np.float32]], changed: dict[str, list[int]]) -> set[str]:
    signatures = LayerSignatures(len(LAYERS))
    for key, states_rlh in tails.items():
        signatures.add(key, states_rlh[:, changed[key]] if key in changed else states_rlh)
    return set(signatures.out_of_order())


def test_good_samples_that_vary_more_than_others_are_not_called_out_of_order(tails: dict[str, NDArray[np.float32]]) -> None:
    assert found_among(tails, {}) == set()


@pytest.mark.parametrize("order", [[1, 0, 2, 3], [2, 1, 0, 3], [0, 1, 3, 2]], ids=str)
def test_layers_in_another_order_are_found_among_hundreds(tails: dict[str, NDArray[np.float32]], order: list[int]) -> None:
    changed = {str(n): order for n in range(0, 800, 40)}
    assert found_among(tails, changed) == set(changed)
