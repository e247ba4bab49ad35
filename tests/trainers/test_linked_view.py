"""The linked view against what the real readers open, and what it must never show them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
from safetensors.torch import load_file

from data_contracts.handoff import MANIFEST_FILE, HandoffManifest
from drafter_data.checkpoints import Checkpoint
from drafter_data.embedded.llama import Llama
from drafter_data.errors import IdentityMismatch, InputError, UsageError
from drafter_data.safetensors_file import TensorFile
from drafter_data.store.store import Store
from drafter_data.trainers.arrow_dataset import read_arrow_dataset
from drafter_data.trainers.folder import check_folder, read_files_table
from drafter_data.trainers.handoff import hand_off
from drafter_data.trainers.registry import trainer_named
from tests.store.making import write_dataset
from tests.trainers.test_defects import damage
from tests.trainers.world import LAYERS, Row, World, commit_states, identity_of_model, make_world


def hand_off_to(world: World, out: Path, trainer: str = "speculators", **options: str) -> HandoffManifest:
    """A hand-off with options."""
    return hand_off(trainer_named(trainer), world.dataset, world.store, out, model=world.model, options=options)


def test_linked_view_opens_with_the_real_readers_in_one_order(shared_world: World, tmp_path: Path) -> None:
    manifest = hand_off_to(shared_world, tmp_path / "out")
    data = datasets.load_from_disk(str(tmp_path / "out/data"))
    assert data.format["type"] == "torch"
    assert len(data) == manifest.samples == 60
    by_key = {sample.sample_key: sample for sample in shared_world.dataset.samples()}
    keys = read_files_table(tmp_path / "out").column("sample_key").to_pylist()
    for row, key in enumerate(keys):
        state = load_file(tmp_path / f"out/states/hs_{row}.safetensors")
        assert state["token_ids"].tolist() == data[row]["input_ids"].tolist() == by_key[key].input_ids_s.tolist()
        assert data[row]["loss_mask"].tolist() == by_key[key].loss_mask_s.tolist()
        assert state["hidden_states"].shape == (int(data[row]["seq_len"]), 4, 64)


def test_arrow_dataset_is_what_save_to_disk_writes(shared_world: World, tmp_path: Path) -> None:
    hand_off_to(shared_world, tmp_path / "out")
    ours = datasets.load_from_disk(str(tmp_path / "out/data"))
    rows = ours.with_format(None).to_list()
    theirs = datasets.Dataset.from_list(rows)
    theirs.set_format("torch")
    theirs.save_to_disk(str(tmp_path / "theirs"))
    assert ours.features == datasets.load_from_disk(str(tmp_path / "theirs")).features
    for name in ("dataset_info.json", "state.json"):
        found, expected = (json.loads((folder / name).read_text()) for folder in (tmp_path / "out/data", tmp_path / "theirs"))
        found.pop("_fingerprint", None)
        expected.pop("_fingerprint", None)
        assert found == expected
    assert sorted(p.name for p in (tmp_path / "out/data").iterdir()) == sorted(p.name for p in (tmp_path / "theirs").iterdir())


def test_linked_view_states_are_hard_links_that_cost_nothing(shared_world: World, tmp_path: Path) -> None:
    hand_off_to(shared_world, tmp_path / "out")
    for record in read_files_table(tmp_path / "out").to_pylist():
        link, source = tmp_path / "out" / record["file"], shared_world.store.path_of(record["state_key"])
        assert link.samefile(source)
        assert not link.is_symlink()


def test_linked_view_across_file_systems_uses_relative_symbolic_links(shared_world: World, tmp_path: Path) -> None:
    shared_memory = Path("/dev/shm")
    if not shared_memory.is_dir() or shared_memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system")
    out = shared_memory / f"drafter-data-test-{tmp_path.parent.name}-{tmp_path.name}"
    try:
        hand_off_to(shared_world, out)
        link = out / "states/hs_0.safetensors"
        assert link.is_symlink()
        assert not link.readlink().is_absolute()
        assert load_file(link)["hidden_states"].shape[1] == 4
        assert check_folder(out) == []
    finally:
        shutil.rmtree(out, ignore_errors=True)


def test_vocabulary_counts_supervised_tokens_of_the_training_rows_alone(shared_world: World, tmp_path: Path) -> None:
    manifest = hand_off_to(shared_world, tmp_path / "out", draft_vocab_size="100", validation_share="0.3")
    data = datasets.load_from_disk(str(tmp_path / "out/data"))
    counts = np.zeros(1024, dtype=np.int64)
    for row in range(manifest.train_samples):
        np.add.at(counts, data[row]["input_ids"][data[row]["loss_mask"].bool()].numpy(), 1)
    folder = tmp_path / "out/vocabulary"
    assert np.array_equal(np.load(folder / "token_freq.npy"), counts)
    d2t, t2d = np.load(folder / "d2t-100.npy"), np.load(folder / "t2d-100.npy")
    chosen = d2t + np.arange(100)
    assert np.array_equal(np.flatnonzero(t2d), chosen)
    assert sorted(chosen) == sorted(sorted(range(1024), key=lambda token: (-counts[token], token))[:100])
    assert f"{folder}/d2t-100.npy" in manifest.command


def test_split_is_stable_when_the_data_grows_and_its_validation_rows_come_last(
    shared_world: World, world: World, tmp_path: Path
) -> None:
    sides: list[dict[str, str]] = []
    for n, each in enumerate((shared_world, world)):
        manifest = hand_off_to(each, tmp_path / f"out{n}", validation_share="0.3")
        table = read_files_table(tmp_path / f"out{n}").to_pylist()
        splits = [record["split"] for record in table]
        assert splits == ["train"] * manifest.train_samples + ["validation"] * manifest.validation_samples
        assert 0 < manifest.validation_samples < manifest.samples / 2
        sides.append({record["sample_key"]: record["split"] for record in table})
    large, small = sides
    assert {key: large[key] for key in small} == small


def test_order_split_and_vocabulary_are_these_on_every_machine(tmp_path: Path, model: Path) -> None:
    rng = np.random.default_rng(11)
    rows = [(rng.integers(5, 1024, n + 8), (np.arange(n + 8) > 3).astype(np.uint8)) for n in range(20)]
    hand_off_to(make_world(tmp_path, model, rows), tmp_path / "out", validation_share="0.3", draft_vocab_size="64")
    digest = hashlib.sha256()
    for record in read_files_table(tmp_path / "out").to_pylist():
        digest.update(f"{record['sample_key']} {record['state_key']} {record['split']} {record['file']}\n".encode())
    for name in ("token_freq", "d2t-64", "t2d-64"):
        digest.update(np.load(tmp_path / f"out/vocabulary/{name}.npy").tobytes())
    for ids_s, mask_s in read_arrow_dataset(tmp_path / "out/data"):
        digest.update(ids_s.tobytes() + mask_s.tobytes())
    assert digest.hexdigest() == "2e4959f7bcf37424a8a466b763c95b3367812dc21cc1087cb8936e22bcf281fd"


def test_train_ratio_cuts_every_dataset_where_the_split_is() -> None:
    from drafter_data.trainers.speculators import train_ratio

    for rows in (2, 3, 7, 10, 37, 100, 999, 37_312, 100_000, 1_000_003):
        for train in {1, rows // 2 or 1, rows - 1}:
            ratio = float(repr(train_ratio(train, rows)))
            assert int(rows * ratio) == train
            assert 0 < ratio < 1


def test_hand_off_again_into_its_own_folder_returns_what_is_there(world: World, tmp_path: Path) -> None:
    first = hand_off_to(world, tmp_path / "out")
    changed = (tmp_path / "out" / MANIFEST_FILE).stat().st_mtime_ns
    assert hand_off_to(world, tmp_path / "out") == first
    assert (tmp_path / "out" / MANIFEST_FILE).stat().st_mtime_ns == changed
    with pytest.raises(InputError, match="not an empty folder"):
        hand_off_to(world, tmp_path / "out", validation_share="0.4")


def test_hand_off_that_fails_leaves_no_folder(world: World, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="draft_vocab_size 5000"):
        hand_off_to(world, tmp_path / "parent/out", draft_vocab_size="5000")
    assert list((tmp_path / "parent").iterdir()) == []


def test_store_of_another_model_is_refused_with_both_named(world: World, tmp_path: Path, model: Path) -> None:
    other = Store.open(tmp_path / "other", identity_of_model(model, weights_digest="ab" * 20))
    with pytest.raises(IdentityMismatch, match="abababab"):
        hand_off(trainer_named("speculators"), world.dataset, other, tmp_path / "out", model=model)


def test_post_norm_store_is_refused_for_speculators(world: World, tmp_path: Path, model: Path) -> None:
    other = Store.open(tmp_path / "other", identity_of_model(model, final_norm="post"))
    with pytest.raises(IdentityMismatch, match="specforge"):
        hand_off(trainer_named("speculators"), world.dataset, other, tmp_path / "out", model=model)
    assert not (tmp_path / "out").exists()


def post_norm_world(folder: Path, model: Path, rows: list[Row]) -> World:
    """The same states as an older dump holds them, the final one after the norm."""
    norm, llama = Checkpoint.open(model).final_norm(), Llama.load(model)
    store = Store.open(folder / "post", identity_of_model(model, final_norm="post"))
    for ids_s, _ in rows:
        states_slh = llama.forward(ids_s, LAYERS)
        states_slh[:, -1] = norm(states_slh[:, -1])
        commit_states(store, ids_s, states_slh)
    return World(model, write_dataset(folder / "post-dataset", rows), store)


def test_post_norm_store_is_recovered_for_speculators_where_that_is_asked_for(
    tmp_path: Path, model: Path, answers: list[Row]
) -> None:
    world, out = post_norm_world(tmp_path, model, answers[:12]), tmp_path / "out"
    damage(world, 4, "nan")
    manifest = hand_off_to(world, out, recover_pre_norm="true", max_error_rate="0.1")
    assert [exclusion.reason for exclusion in manifest.exclusions] == ["not-finite"]
    ids = [
        load_file(path)["token_ids"].tolist() for path in sorted((out / "states").iterdir(), key=lambda path: int(path.stem[3:]))
    ]
    assert ids == [ids_s.tolist() for ids_s, _ in read_arrow_dataset(out / "data")]
    assert manifest.options["recover_pre_norm"] == "true"
    assert "before the norm again, as post / scale" in (out / "README.md").read_text()
    norm = Checkpoint.open(model).final_norm()
    for record in read_files_table(out).to_pylist():
        recovered = load_file(out / record["file"])
        post_slh = world.store.read(record["state_key"]).states_slh
        assert np.array_equal(recovered["hidden_states"][:, :3].numpy(), post_slh[:, :3])
        assert np.allclose(norm(recovered["hidden_states"][:, 3].numpy()), post_slh[:, 3], rtol=1e-5, atol=1e-6)
        assert not np.allclose(recovered["hidden_states"][:, 3].numpy(), post_slh[:, 3], rtol=1e-2)
    assert check_folder(out) == []
    assert trainer_named("speculators").needs(world.dataset, world.store).bytes > manifest.bytes


def test_recovery_is_refused_where_the_norm_cannot_be_undone_or_need_not_be(
    world: World, tmp_path: Path, model: Path, answers: list[Row]
) -> None:
    with pytest.raises(UsageError, match="holds final states before the norm"):
        hand_off_to(world, tmp_path / "out", recover_pre_norm="true")
    other = tmp_path / "zero-scale"
    shutil.copytree(model, other)
    (weights,) = other.glob("*.safetensors")
    post = post_norm_world(tmp_path, model, answers[:12])
    weights.chmod(0o644)
    with TensorFile.open(weights) as file, weights.open("r+b") as handle:
        handle.seek(file.header_bytes + file.tensors["model.norm.weight"].start)
        handle.write(bytes(4))
    with pytest.raises(InputError, match="scale of zero in 1 of 64 channels"):
        hand_off_to(World(other, post.dataset, post.store), tmp_path / "out", recover_pre_norm="true")


def test_check_names_a_file_that_was_damaged_after_the_hand_off(world: World, tmp_path: Path) -> None:
    hand_off_to(world, tmp_path / "out")
    assert check_folder(tmp_path / "out") == []
    path = tmp_path / "out/states/hs_3.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)
    (tmp_path / "out/states/hs_5.safetensors").unlink()
    (tmp_path / "out/vocabulary/token_freq.npy").write_bytes(b"")
    findings = {(finding.reason, finding.file) for finding in check_folder(tmp_path / "out")}
    assert findings == {
        ("checksum", "states/hs_3.safetensors"),
        ("file-missing", "states/hs_5.safetensors"),
        ("checksum", "vocabulary/token_freq.npy"),
    }
