"""Layers of older dumps in .pt files: read without running anything from them."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drafter_data.claiming.pt_layer import PtLayer
from drafter_data.errors import PreflightRefused
from drafter_data.safetensors_file import MalformedFile, as_float32


def opened(path: Path) -> PtLayer:
    """The layer in a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return PtLayer.of_descriptor(descriptor, path.name)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("nested", [False, True])
def test_pt_layer_gives_the_saved_states(tmp_path: Path, dtype: torch.dtype, nested: bool) -> None:
    states = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).to(dtype).t().contiguous().t()
    torch.save({"hidden_states": states} if nested else states, tmp_path / "layer_2.pt")
    layer = opened(tmp_path / "layer_2.pt")
    entry = layer.tensors["hidden_states"]
    assert entry.shape == (5, 6)
    assert np.array_equal(as_float32(layer.array("hidden_states"), entry.dtype), states.float().numpy())


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("escaped",))


@pytest.mark.parametrize("way", ["pickle", "torch", "half", "text", "integers", "empty"])
def test_pt_layer_that_is_none_is_malformed_and_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "layer_2.pt"
    if way == "pickle":
        path.write_bytes(pickle.dumps(Evil()))
    elif way == "torch":
        torch.save({"hidden_states": Evil()}, path)
    elif way == "integers":
        torch.save(torch.arange(4).reshape(2, 2), path)
    else:
        torch.save(torch.randn(50, 60), path)
        path.write_bytes({"half": path.read_bytes()[:6000], "text": b"layer", "empty": b""}[way])
    with pytest.raises(MalformedFile):
        opened(path)
    assert not (tmp_path / "escaped").exists()


def test_pt_layer_without_torch_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(torch.randn(2, 2), tmp_path / "layer_2.pt")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(PreflightRefused, match=r"drafter-data\[torch\]"):
        opened(tmp_path / "layer_2.pt")
