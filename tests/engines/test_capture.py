"""The capture hook without an engine: passes of made-up tensors, as `logits_processor` sees them. Runs in `make test`.

Tensor legend: T rows of a pass, S rows of a request, L stored layers, H hidden size.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from data_contracts import dump as contract
from drafter_data.engines.launch_sglang import CAPTURE_FOLDER
from drafter_data.safetensors_file import TensorFile

H = 16
LAYERS = [2, 4, 5, 8]


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The hook's module, loaded from its file alone, on attention rank 0."""
    spec = importlib.util.spec_from_file_location("hook_under_test", CAPTURE_FOLDER / "sglang_hook.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "_attention_tp_rank", lambda: 0)
    return module


def config(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"version": 1, "dump_folder": str(folder), "layers": LAYERS, "final_norm": "pre", "via": "aux", **changes}


class Norm(torch.nn.Module):
    """An RMS norm with SGLang's calling convention."""

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        total = hidden if residual is None else hidden + residual
        normed = total / total.square().mean(-1, keepdim=True).add(1e-6).sqrt() * 1.5
        return normed if residual is None else (normed, total)


class Engine:
    """Calls the hooks in the order of a forward pass."""

    def __init__(self, hook: ModuleType, settings: dict[str, Any], seed: int = 0) -> None:
        self.norm = hook.final_norm(settings)
        self.layers = {layer: hook.layer_input({**settings, "layer": layer}) for layer in settings["layers"][:-1]}
        self.logits = hook.logits(settings)
        self.random = torch.Generator().manual_seed(seed)

    def run(self, requests: list[tuple[str, int, int]], *, aux_layers: int = 3, spoil: str = "", mode: str = "extend") -> Any:
        """A pass of (rid, start, rows); returns the columns [T, L, H], the ids [T] and what the requests are told."""
        rows = sum(request[2] for request in requests)
        normal = lambda: torch.randn(rows, H, generator=self.random)  # noqa: E731
        states, partial, module = [normal() for _ in range(3)], normal(), Norm()
        ids = torch.randint(0, 1000, (rows,), generator=self.random)
        for layer, states_th in zip(self.layers, states, strict=True):
            self.layers[layer](None, (partial, states_th), (partial, states_th + (spoil == "layer")))
        before = normal()
        output = module(partial, before)
        if spoil != "no norm":
            self.norm(module, (partial, before), (output[0], output[1] + (spoil == "norm")))
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_extend=lambda: mode == "extend"),
            rids=None if spoil == "no rids" else [request[0] for request in requests],
            extend_seq_lens_cpu=[request[2] for request in requests],
            extend_prefix_lens_cpu=[request[1] for request in requests],
            input_ids=ids,
        )
        reply = SimpleNamespace(customized_info=None)
        packed = torch.cat(states[:aux_layers], dim=-1) if aux_layers else None
        aux = states if spoil == "list" else packed
        self.logits(None, (None, output[0], None, batch, aux), reply)
        told = (reply.customized_info or {}).get(contract.ACKNOWLEDGEMENT)
        return torch.stack([*states, output[1]], 1), ids, told


def read(folder: Path, rid: str, start: int, end: int) -> tuple[np.ndarray, np.ndarray, dict[str, str]]:
    with TensorFile.open(folder / contract.name_of(rid, start, end)) as file:
        assert file.header_bytes == contract.HEADER_BYTES
        assert file.tensors["token_ids"].start == 0
        return np.array(file.array("hidden_states")), np.array(file.array("token_ids")), file.metadata


def test_hook_constants_equal_the_contract(hook: ModuleType) -> None:
    names = ("DUMP_VERSION", "RID_PREFIX", "FILE_PREFIX", "TEMPORARY_PREFIX", "HEADER_BYTES", "ACKNOWLEDGEMENT")
    assert {name: getattr(hook, name) for name in names} == {name: getattr(contract, name) for name in names}
    assert hook.name_of("dd-é/../x", 3, 9) == contract.name_of("dd-é/../x", 3, 9)


def test_hook_file_alone_is_enough_for_the_server() -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(CAPTURE_FOLDER)!r}); import sglang_hook;"
        "assert not [name for name in sys.modules if name.split('.')[0] in ('drafter_data', 'data_contracts', 'pydantic')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd="/")


@pytest.mark.parametrize("form", ["", "list"])
def test_hook_writes_each_request_of_a_mixed_pass(hook: ModuleType, tmp_path: Path, form: str) -> None:
    folder = tmp_path / "dumps"
    engine = Engine(hook, config(folder))
    columns, ids, told = engine.run([("dd-a", 0, 5), ("other", 0, 3), ("dd-b", 7, 4)], spoil=form)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert told == [
        contract.Acknowledgement(start=0, end=5).model_dump(), None, contract.Acknowledgement(start=7, end=11).model_dump()
    ]  # fmt: skip
    for rid, start, rows in (("dd-a", 0, slice(0, 5)), ("dd-b", 7, slice(8, 12))):
        states, found_ids, metadata = read(folder, rid, start, start + rows.stop - rows.start)
        assert np.array_equal(states, columns[rows].numpy()) and np.array_equal(found_ids, ids[rows].numpy())
        assert metadata["rid"] == rid and metadata["layers"] == "2,4,5,8" and metadata["final_norm"] == "pre"
    assert len(list(folder.iterdir())) == 2


def test_hook_in_bfloat16_keeps_the_bits(hook: ModuleType, tmp_path: Path) -> None:
    states = torch.randn(3, 4, H).bfloat16()
    piece = hook.Piece(0, "dd-bits", 0, 0, 3)
    hook.Capture(config(tmp_path))._write(piece, states, torch.arange(3))
    found, _, _ = read(tmp_path, "dd-bits", 0, 3)
    assert np.array_equal(found, states.view(torch.uint16).numpy())


@pytest.mark.parametrize(
    ("spoil", "aux_layers", "says"),
    [("norm", 3, "final_norm post"), ("layer", 3, "--return-aux-hidden-state-layer-ids"), ("no norm", 3, "norm"), ("", 2, "2")],
)
def test_hook_self_check_refuses_and_keeps_refusing(
    hook: ModuleType, tmp_path: Path, spoil: str, aux_layers: int, says: str
) -> None:
    engine = Engine(hook, config(tmp_path))
    for _ in range(2):
        _, _, told = engine.run([("dd-a", 0, 5)], spoil=spoil, aux_layers=aux_layers)
        assert says in told[0]["error"]
    assert list(tmp_path.iterdir()) == []


def test_hook_leaves_decode_steps_and_nameless_batches_alone(hook: ModuleType, tmp_path: Path) -> None:
    engine = Engine(hook, config(tmp_path))
    assert engine.run([("dd-a", 0, 5)], mode="decode")[2] is None
    assert engine.run([("dd-a", 0, 5)], spoil="no rids")[2] is None
    assert engine.run([("HEALTH_CHECK_1", 0, 1)])[2] is None
    assert list(tmp_path.iterdir()) == []


def test_hook_repeats_an_earlier_piece_s_error_in_the_last_word(hook: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    engine = Engine(hook, config(folder))
    engine.run([("dd-x", 0, 1)])
    folder.rename(tmp_path / "away")
    _, _, first = engine.run([("dd-a", 0, 5)])
    (tmp_path / "away").rename(folder)
    _, _, last = engine.run([("dd-a", 5, 2)])
    assert "No such file" in first[0]["error"] and last[0]["error"] == first[0]["error"] and last[0]["end"] == 7


def test_hook_input_norm_way_and_post_norm(hook: ModuleType, tmp_path: Path) -> None:
    engine = Engine(hook, config(tmp_path, via="input_layernorm", final_norm="post"))
    columns, _, told = engine.run([("dd-a", 0, 5)], aux_layers=0)
    states, _, metadata = read(tmp_path, "dd-a", 0, 5)
    assert told[0]["error"] == "" and metadata["final_norm"] == "post"
    assert np.array_equal(states[:, :3], columns[:, :3].numpy())
    assert np.allclose(states[:, 3], Norm()(columns[:, 3]).numpy())


def test_hook_with_writer_threads_keeps_its_promises(hook: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    engine = Engine(hook, config(folder, writer_threads=2))
    passes = [engine.run([(f"dd-{k}-{i}", 0, 6) for i in range(5)]) for k in range(20)]
    for k, (columns, _, told) in enumerate(passes):
        assert [told[i]["error"] for i in range(5)] == [""] * 5
        for i in range(5):
            assert np.array_equal(read(folder, f"dd-{k}-{i}", 0, 6)[0], columns[6 * i : 6 * i + 6].numpy())


def test_hook_with_writer_threads_tells_what_went_wrong_later(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook, "WAIT_SECONDS", 0.2)
    folder = tmp_path / "dumps"
    engine = Engine(hook, config(folder, writer_threads=1))
    assert engine.run([("dd-x", 0, 1)])[2][0]["error"] == ""
    folder.rename(tmp_path / "away")
    _, _, told = engine.run([("dd-a", 0, 5)])
    assert "No such file" in told[0]["error"]
    (tmp_path / "away").rename(folder)
    assert engine.run([("dd-b", 0, 5)])[2][0]["error"] == ""


def test_hook_with_writer_threads_bounds_what_is_unwritten(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook, "WAIT_SECONDS", 0.2)
    opened = threading.Event()
    write = hook.Capture._write
    monkeypatch.setattr(hook.Capture, "_write", lambda self, *rest: (opened.wait(10), write(self, *rest))[1])
    engine = Engine(hook, config(tmp_path, writer_threads=1))
    waiting = [engine.run([(f"dd-{k}", 0, 5)])[2] for k in range(hook.PINNED_BUFFERS)]
    _, _, refused = engine.run([("dd-one-too-many", 0, 5)])
    assert "Empty" in refused[0]["error"]
    assert "not written within" in waiting[0][0]["error"]
    opened.set()
    assert [told[0]["error"] for told in waiting[1:]] == [""] * (hook.PINNED_BUFFERS - 1)


def test_hook_sweeps_its_own_torn_files_of_dead_servers_only(hook: ModuleType, tmp_path: Path) -> None:
    final = contract.name_of("dd-a", 0, 5)
    torn = tmp_path / f".tmp-{final}.999999999.1"
    living = tmp_path / f".tmp-{final}.{os.getpid()}.1"
    fresh = tmp_path / f".tmp-{final}.999999998.1"
    kept = [living, fresh, tmp_path / ".tmp-other.999999999.1", tmp_path / final]
    for path in [torn, *kept]:
        path.write_bytes(b"x")
        if path is not fresh:
            os.utime(path, (0, 0))
    hook.Capture(config(tmp_path))
    assert sorted(tmp_path.iterdir()) == sorted(kept)


@pytest.mark.parametrize(
    "changes",
    [{"version": 2}, {"layers": [4, 2, 8]}, {"dump_folder": "relative"}, {"colour": "red"}, {"final_norm": "both"}],
    ids=["version", "layers", "folder", "unknown", "norm"],
)
def test_hook_that_cannot_work_stops_the_server_at_its_start(hook: ModuleType, tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises((ValueError, KeyError)):
        hook.logits(config(tmp_path, **changes))
