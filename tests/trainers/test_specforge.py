"""The SpecForge view: the same states as the linked one, converted in parallel, going on after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from data_contracts.handoff import MANIFEST_FILE
from data_contracts.identity import StateDtype, StoreIdentity
from drafter_data.checkpoints import Checkpoint
from drafter_data.engines.base import ClaimedDump
from drafter_data.errors import GateClosed, PreflightRefused
from drafter_data.files import xxh3_of
from drafter_data.store.store import Store
from drafter_data.trainers import specforge
from drafter_data.trainers.folder import PROGRESS_FILE, check_folder, read_files_table
from drafter_data.trainers.handoff import hand_off
from drafter_data.trainers.registry import trainer_named
from tests.store.making import key_of, write_dataset
from tests.trainers.test_defects import DEFECTS, damage, forge_receipt
from tests.trainers.world import World

LAYERS = (2, 4, 5, 8)
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 128, "max_position_embeddings": 128,
}  # fmt: skip


def make_model(folder: Path, kind: str, dtype: torch.dtype) -> Path:
    """A random model whose final norm has a weight that is far from neutral."""
    torch.manual_seed(3)
    model = Gemma2ForCausalLM(Gemma2Config(**SIZES)) if kind == "gemma2" else LlamaForCausalLM(LlamaConfig(**SIZES))
    with torch.no_grad():
        model.model.norm.weight.copy_(0.5 * torch.randn(32) + (0 if kind == "gemma2" else 1))
    model.to(dtype).save_pretrained(folder)
    return folder


def transformers_world(folder: Path, kind: str, dtype: torch.dtype) -> tuple[World, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """States straight from transformers in a real store; by state key the post-norm states and the aux states as it gives them."""
    path = make_model(folder / "model", kind, dtype)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    pre_norm: list[torch.Tensor] = []
    model.model.norm.register_forward_hook(lambda _module, inputs, _output: pre_norm.append(inputs[0]))
    name: StateDtype = "BF16" if dtype == torch.bfloat16 else "F32"
    digest = Checkpoint.open(path).weights_digest()
    identity = StoreIdentity(weights_digest=digest, num_layers=8, hidden_size=32, layers=LAYERS, dtype=name)
    store = Store.open(folder / "store", identity)
    rng = np.random.default_rng(0)
    rows, expected = [], {}
    for n in range(12):
        ids_s = rng.integers(0, 128, 10 + n).astype(np.int64)
        with torch.inference_mode():
            hidden = model(torch.from_numpy(ids_s)[None], output_hidden_states=True).hidden_states
        states = torch.stack([*(hidden[layer][0] for layer in LAYERS[:3]), pre_norm[-1][0]], dim=1).contiguous()
        array: NDArray[np.generic] = states.view(torch.int16).numpy().view(np.uint16) if name == "BF16" else states.numpy()
        dump = ClaimedDump("dd", array, name, ids_s, "label", None, ())  # type: ignore[arg-type]
        store.commit(dump, key_of(ids_s), ids_s)
        expected[key_of(ids_s)] = (hidden[8][0].clone(), states[:, :3].clone())
        rows.append((ids_s, (np.arange(len(ids_s)) > 4).astype(np.uint8)))
    return World(path, write_dataset(folder / "dataset", rows), store), expected


def ulps_apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Distance of bfloat16 values in units in the last place."""

    def ordered(x: torch.Tensor) -> torch.Tensor:
        bits = x.contiguous().view(torch.int16).to(torch.int32)
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return (ordered(a) - ordered(b)).abs()


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_both_layouts_hold_the_states_that_transformers_gives(
    kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specforge, "_BLOCK_VALUES", 3 * 32)  # three rows at a time, as 64 of a model of today's size
    world, expected = transformers_world(tmp_path, kind, dtype)
    linked = hand_off(trainer_named("speculators"), world.dataset, world.store, tmp_path / "linked", model=world.model)
    converted = hand_off(
        trainer_named("specforge"),
        world.dataset,
        world.store,
        tmp_path / "converted",
        model=world.model,
        options={"states_dtype": "store"},
    )
    assert linked.samples == converted.samples == 12
    norm = AutoModelForCausalLM.from_pretrained(world.model, dtype=dtype).model.norm
    ours = read_files_table(tmp_path / "converted").to_pylist()
    theirs = read_files_table(tmp_path / "linked").to_pylist()
    assert [row["sample_key"] for row in ours] == [row["sample_key"] for row in theirs]
    for converted_row, linked_row in zip(ours, theirs, strict=True):
        sample = torch.load(tmp_path / "converted" / converted_row["file"], weights_only=True)
        state = load_file(tmp_path / "linked" / linked_row["file"])
        post, aux = expected[converted_row["state_key"]]
        with torch.inference_mode():
            renormed = norm(state["hidden_states"][:, -1])
        if dtype == torch.float32:
            assert torch.equal(sample["hidden_state"][0], renormed)
        assert (ulps_apart(sample["hidden_state"][0], renormed) <= 1).float().mean() >= 0.999 or dtype == torch.float32
        assert torch.equal(sample["hidden_state"][0], post)
        assert torch.equal(sample["aux_hidden_state"][0], aux.reshape(len(aux), -1))
        assert torch.equal(sample["input_ids"], state["token_ids"])
        assert sample["loss_mask"].dtype == torch.int64
        assert sample["loss_mask"].shape == sample["input_ids"].shape


def test_specforge_order_is_lexicographic_and_the_splits_are_apart(world: World, tmp_path: Path) -> None:
    options = {"validation_share": "0.3", "draft_vocab_size": "64"}
    out = tmp_path / "out"
    manifest = hand_off(trainer_named("specforge"), world.dataset, world.store, out, model=world.model, options=options)
    table = read_files_table(out).to_pylist()
    for split, folder in (("train", out / "train"), ("validation", out / "validation")):
        listed = [out / row["file"] for row in table if row["split"] == split]
        assert listed == sorted(folder.rglob("*.ckpt"))
    mapping = torch.load(out / "vocab_mapping/vocab_mapping.pt", weights_only=True)
    assert int(mapping["t2d"].sum()) == len(mapping["d2t"]) == 64
    assert torch.equal(torch.arange(64) + mapping["d2t"], mapping["t2d"].nonzero()[:, 0])
    assert len(list((out / "target").glob("*.index.json"))) == 1
    assert check_folder(out) == []
    assert "specforge.yaml" in " ".join(manifest.command)
    again = hand_off(trainer_named("specforge"), world.dataset, world.store, out, model=world.model, options=options)
    assert again == manifest


@pytest.mark.parametrize("forged", [False, True], ids=["own-receipt", "forged-receipt"])
@pytest.mark.parametrize("name", DEFECTS)
def test_specforge_view_never_holds_a_defect(name: str, forged: bool, world: World, tmp_path: Path) -> None:
    path = damage(world, 7, name)
    if forged:
        forge_receipt(world.store, path.stem)
    manifest = hand_off(
        trainer_named("specforge"),
        world.dataset,
        world.store,
        tmp_path / "out",
        model=world.model,
        options={"max_error_rate": "1"},
    )
    (exclusion,) = manifest.exclusions
    assert exclusion.sample_key == world.key(7)
    # The conversion compares checksums last: what the content shows before is named for that.
    assert exclusion.reason in DEFECTS[name].forged_as | (set() if forged else DEFECTS[name].caught_as), exclusion.detail
    assert len(list((tmp_path / "out").rglob("*.ckpt"))) == 23


def test_specforge_hand_off_is_refused_by_default_for_what_only_the_conversion_reads(world: World, tmp_path: Path) -> None:
    path = damage(world, 7, "nan")
    forge_receipt(world.store, path.stem)
    with pytest.raises(GateClosed, match="not-finite 1.*" + world.key(7)[:12]):
        hand_off(trainer_named("specforge"), world.dataset, world.store, tmp_path / "out", model=world.model)
    assert not (tmp_path / "out").exists()


def test_specforge_conversion_goes_on_after_a_kill_without_writing_again(world: World, tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = (
        "import time, sys; from pathlib import Path\n"
        "from drafter_data.trainers import specforge\n"
        "write = specforge.SampleWriter.write\n"
        "def slow(self, *arguments):\n    time.sleep(0.15)\n    write(self, *arguments)\n"
        "specforge.SampleWriter.write = slow\n"
        "from drafter_data.cli.main import main\nmain(sys.argv[1:])\n"
    )
    arguments = ["handoff", str(world.dataset.folder), str(world.store.root), "--trainer", "specforge", "--model", str(world.model)]
    arguments += ["--out", str(out), "--option", "workers=1"]
    process = subprocess.Popen([sys.executable, "-c", script, *arguments], start_new_session=True)
    deadline = time.monotonic() + 200
    while sum(len(path.read_bytes().splitlines()) for path in tmp_path.glob(f".tmp-out.*/{PROGRESS_FILE}")) < 5:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not out.exists()
    (partial,) = tmp_path.glob(".tmp-out.*")
    named = {line.split(b'"')[3].decode() for line in (partial / PROGRESS_FILE).read_bytes().splitlines()[:5]}
    before = {name: (partial / name).stat().st_ino for name in named}
    hand_off(trainer_named("specforge"), world.dataset, world.store, out, model=world.model, options={"workers": "1"})
    assert {name: (out / name).stat().st_ino for name in named} == before
    assert len(list(out.rglob("*.ckpt"))) == 24
    assert check_folder(out) == []
    assert not list(tmp_path.glob(".tmp-*"))
    assert not list(out.rglob(".tmp-*"))


def test_specforge_disk_need_is_predicted_before_anything_is_written(world: World, tmp_path: Path) -> None:
    trainer = trainer_named("specforge")
    need = trainer.needs(world.dataset, world.store).bytes
    hand_off(trainer, world.dataset, world.store, tmp_path / "out", model=world.model)
    written = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*.ckpt"))
    assert written <= need <= 2.5 * written
    other = tmp_path / "other"
    with pytest.raises(PreflightRefused, match="keep free"):
        hand_off(trainer, world.dataset, world.store, other, model=world.model, keep_free_bytes=10**18)
    assert not other.exists()
    assert not list(tmp_path.glob(".tmp-*"))


def test_specforge_files_are_the_same_bytes_on_every_run(world: World, tmp_path: Path) -> None:
    for name, workers in (("a", "1"), ("b", "3")):
        hand_off(
            trainer_named("specforge"),
            world.dataset,
            world.store,
            tmp_path / name,
            model=world.model,
            options={"workers": workers, "draft_vocab_size": "32"},
        )
    names = sorted(str(path.relative_to(tmp_path / "a")) for path in (tmp_path / "a").rglob("*") if path.is_file())
    differing = [name for name in names if xxh3_of(tmp_path / "a" / name) != xxh3_of(tmp_path / "b" / name)]
    assert set(differing) <= {MANIFEST_FILE, "specforge.yaml"}, "only their own folder's name may differ"
