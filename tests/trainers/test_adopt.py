"""Earlier extractions with seeded damage: exactly the good samples are taken."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from drafter_data.checkpoints import Checkpoint
from drafter_data.dataset import Dataset
from drafter_data.embedded.llama import Llama
from drafter_data.files import xxh3_of
from drafter_data.store.store import Store
from drafter_data.trainers.adopt import Adoption, AdoptReport, identity_for
from drafter_data.trainers.adopt_sources import EarlierExtraction, open_req_folders, open_specforge, open_speculators
from drafter_data.trainers.handoff import hand_off
from drafter_data.trainers.registry import trainer_named
from tests.store.making import key_of
from tests.support.engines import RunningEngine, running_engine
from tests.trainers.world import LAYERS, Row, World, own_answers

Tensors = dict[str, NDArray[np.generic]]
SAMPLES = 120


@pytest.fixture(scope="session")
def earlier_rows(model: Path) -> list[Row]:
    return own_answers(Llama.load(model), SAMPLES, seed=9, longest=40)


@pytest.fixture(scope="session")
def earlier_states(model: Path, earlier_rows: list[Row]) -> list[NDArray[np.float32]]:
    llama = Llama.load(model)
    return [llama.forward(ids_s, LAYERS) for ids_s, _ in earlier_rows]


def not_a_number(states: NDArray[np.float32]) -> NDArray[np.float32]:
    states[len(states) // 2, 1, 3] = np.nan
    return states


STATE_DAMAGE: dict[str, Callable[[NDArray[np.float32]], NDArray[np.float32]]] = {
    "nan": not_a_number,
    "row-short": lambda states: states[:-1],
    "layer-order": lambda states: states[:, [2, 1, 0, 3]],
    "two-layers-equal": lambda states: states[:, [0, 1, 1, 3]],
    "zeros": lambda states: np.where(np.arange(len(states))[:, None, None] == 3, np.float32(0), states),
}


def damaged_states(
    states: list[NDArray[np.float32]], rows: list[Row], wrong_norm: list[NDArray[np.float32]]
) -> tuple[list[NDArray[np.float32]], set[int]]:
    """5 % of the samples, chosen by seed, damaged in turn by every kind; returns the states and who is damaged.

    `wrong_norm` are the final states on the other side of the norm.
    """
    chosen = random.Random(5).sample(range(len(states)), len(states) // 20)
    found = [each.copy() for each in states]
    kinds = list(STATE_DAMAGE.values())
    for k, n in enumerate(chosen[: len(kinds)]):
        found[n] = np.ascontiguousarray(kinds[k](found[n]))
    last = chosen[-1]
    other = next(n for n in range(len(rows)) if n not in chosen and len(rows[n][0]) >= len(rows[last][0]))
    found[last] = np.ascontiguousarray(states[other][: len(states[last])])  # right ids, somebody else's states
    extra = next(n for n in range(len(rows)) if n not in chosen and n != other)
    found[extra][:, -1] = wrong_norm[extra]
    return found, {*chosen, extra}


def adopt(extraction: EarlierExtraction, store: Path, model: Path) -> tuple[AdoptReport, Store]:
    checkpoint = Checkpoint.open(model)
    opened = Store.open(store, identity_for(extraction, checkpoint, None))
    return Adoption(extraction, opened, checkpoint).run(), opened


def keys_of(rows: list[Row]) -> list[str]:
    return [key_of(ids_s) for ids_s, _ in rows]


def write_speculators(folder: Path, rows: list[Row], states: list[NDArray[np.float32]]) -> None:
    records = [{"input_ids": ids.tolist(), "loss_mask": mask.tolist(), "seq_len": len(ids)} for ids, mask in rows]
    data = datasets.Dataset.from_list(records)
    data.set_format("torch")
    data.save_to_disk(str(folder / "data"))
    (folder / "hs").mkdir()
    for n, ((ids, _), each) in enumerate(zip(rows, states, strict=True)):
        save_file({"token_ids": ids[: len(each)].copy(), "hidden_states": each}, folder / f"hs/hs_{n}.safetensors")


def write_specforge(folder: Path, rows: list[Row], states: list[NDArray[np.float32]]) -> None:
    for n, ((ids, mask), each) in enumerate(zip(rows, states, strict=True)):
        path = folder / f"rows_{n // 50 * 50}-{n // 50 * 50 + 50}/data_{n}.ckpt"
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = torch.from_numpy(each.copy())
        record = {
            "input_ids": torch.from_numpy(ids),
            "loss_mask": torch.from_numpy(mask.astype(np.int64)),
            "aux_hidden_state": tensors[:, :3].reshape(1, len(each), -1),
            "hidden_state": tensors[:, 3][None].contiguous(),
        }
        torch.save(record, path)


def test_adopt_speculators_folder_takes_exactly_the_undamaged_samples(
    tmp_path: Path, model: Path, earlier_rows: list[Row], earlier_states: list[NDArray[np.float32]]
) -> None:
    norm = Checkpoint.open(model).final_norm()
    states, bad = damaged_states(earlier_states, earlier_rows, [norm(each[:, -1]) for each in earlier_states])
    write_speculators(tmp_path / "earlier", earlier_rows, states)
    spare = [n for n in range(SAMPLES) if n not in bad][:3]
    cut, foreign, gone = (tmp_path / f"earlier/hs/hs_{n}.safetensors" for n in spare)
    cut.write_bytes(cut.read_bytes()[:-50])
    tensors = load_file(foreign)
    save_file({"token_ids": tensors["token_ids"][::-1].copy(), "hidden_states": tensors["hidden_states"]}, foreign)
    gone.unlink()
    bad |= set(spare)
    report, store = adopt(open_speculators(tmp_path / "earlier", None), tmp_path / "store", model)
    keys = keys_of(earlier_rows)
    assert {key for key in keys if key in store} == {key for n, key in enumerate(keys) if n not in bad}
    assert report.read == SAMPLES - 1
    assert report.read == report.adopted + report.already_there + sum(report.rejected.values())
    assert store.identity.final_norm == "pre"
    assert all(receipt.proof == "adopted" for receipt in store.receipts())
    for n in sorted(set(range(SAMPLES)) - bad)[:10]:
        assert np.array_equal(store.read(keys[n]).states_slh, earlier_states[n])


def test_adopt_specforge_folder_makes_a_post_norm_store_of_exactly_the_undamaged_samples(
    tmp_path: Path, model: Path, earlier_rows: list[Row], earlier_states: list[NDArray[np.float32]]
) -> None:
    norm = Checkpoint.open(model).final_norm()
    post = [each.copy() for each in earlier_states]
    for each in post:
        each[:, -1] = norm(each[:, -1])
    states, bad = damaged_states(post, earlier_rows, [each[:, -1] for each in earlier_states])
    write_specforge(tmp_path / "earlier", earlier_rows, states)
    spare = [n for n in range(SAMPLES) if n not in bad][:1]
    cut = next((tmp_path / "earlier").rglob(f"data_{spare[0]}.ckpt"))
    cut.write_bytes(cut.read_bytes()[:-500])
    bad |= set(spare)
    report, store = adopt(open_specforge(tmp_path / "earlier", None), tmp_path / "store", model)
    keys = keys_of(earlier_rows)
    taken = {n for n, key in enumerate(keys) if key in store}
    assert taken == set(range(SAMPLES)) - bad, report.findings
    assert store.identity.final_norm == "post"
    assert report.read == SAMPLES == report.adopted + sum(report.rejected.values())


def test_adopt_request_folders_finds_each_prompt_among_those_of_its_length(
    tmp_path: Path, model: Path, earlier_rows: list[Row], earlier_states: list[NDArray[np.float32]]
) -> None:
    from tests.store.making import write_dataset

    dataset = write_dataset(tmp_path / "dataset", earlier_rows)
    for n, each in enumerate(earlier_states):
        folder = tmp_path / f"earlier/req_{n + 17:08d}"
        folder.mkdir(parents=True)
        for column, layer in enumerate(LAYERS):
            save_file({"hidden_states": np.ascontiguousarray(each[:, column])}, folder / f"layer_{layer}.safetensors")
        (folder / "meta.json").write_text(json.dumps({"num_tokens": len(each), "final_norm": "pre"}))
    (tmp_path / "earlier/req_00000020/meta.json").unlink()  # a dump that was never finished
    warm_up = tmp_path / "earlier/req_00000001"
    warm_up.mkdir()
    stranger = Llama.load(model).forward(np.arange(5, 5 + len(earlier_states[0])), LAYERS)
    for column, layer in enumerate(LAYERS):
        save_file({"hidden_states": np.ascontiguousarray(stranger[:, column])}, warm_up / f"layer_{layer}.safetensors")
    (warm_up / "meta.json").write_text(json.dumps({"num_tokens": len(stranger), "final_norm": "pre"}))
    report, store = adopt(open_req_folders(tmp_path / "earlier", Dataset.open(dataset.folder)), tmp_path / "store", model)
    keys = keys_of(earlier_rows)
    assert {n for n, key in enumerate(keys) if key in store} == set(range(SAMPLES)) - {3}
    assert sum(report.rejected.values()) == 2
    for n in (0, 1, 50, 119):
        assert np.array_equal(store.read(keys[n]).states_slh, earlier_states[n])


def test_adopt_command_prints_one_json_report_and_does_not_take_a_sample_twice(
    tmp_path: Path, model: Path, earlier_rows: list[Row], earlier_states: list[NDArray[np.float32]]
) -> None:
    write_speculators(tmp_path / "earlier", earlier_rows[:12], earlier_states[:12])
    command = [sys.executable, "-m", "drafter_data", "adopt", str(tmp_path / "earlier"), "--from", "speculators"]
    command += ["--store", str(tmp_path / "store"), "--model", str(model), "--json"]
    first = subprocess.run(command, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["adopted"] == 12
    before = {path: xxh3_of(path) for path in (tmp_path / "store/states").rglob("*.safetensors")}
    second = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)
    assert (second["adopted"], second["already_there"]) == (0, 12)
    assert {path: xxh3_of(path) for path in (tmp_path / "store/states").rglob("*.safetensors")} == before
    nothing = subprocess.run([*command[:4], str(tmp_path / "store"), *command[5:]], capture_output=True, text=True)
    assert nothing.returncode == 2
    assert nothing.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[RunningEngine]:
    with running_engine(model) as running:
        yield running


def adopt_by_command(earlier: Path, source: str, store: Path, model: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "drafter_data", "adopt", str(earlier), "--from", source, "--store", str(store)]
    return subprocess.run([*command, "--model", str(model), "--json", *more], capture_output=True, text=True)


def test_adopt_with_an_engine_refuses_what_only_extracting_again_can_see(
    tmp_path: Path, model: Path, engine: RunningEngine, earlier_rows: list[Row], earlier_states: list[NDArray[np.float32]]
) -> None:
    llama, rows, states = Llama.load(model), earlier_rows[:24], [each.copy() for each in earlier_states[:24]]
    for n in (5, 11):
        states[n] = llama.forward(rows[n][0], (2, 3, 5, 8))  # layer 3 where layer 4 is due: likely in every other way
    states[17][:, 1] *= 1.01
    write_speculators(tmp_path / "earlier", rows, states)
    blind = json.loads(adopt_by_command(tmp_path / "earlier", "speculators", tmp_path / "blind", model).stdout)
    assert (blind["adopted"], blind["rejected"]) == (24, {}), "nothing else sees it"
    done = adopt_by_command(tmp_path / "earlier", "speculators", tmp_path / "store", model, "--url", engine.url, "--rechecks", "24")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["rejected"] == {"differs-from-engine": 3}
    assert sorted(finding["file"] for finding in report["findings"]) == [f"hs_{n}.safetensors" for n in (11, 17, 5)]
    assert all("layer 4 differs by" in finding["found"] for finding in report["findings"])
    store = Store.open(tmp_path / "store")
    assert {key for key in keys_of(rows) if key in store} == set(keys_of(rows)) - {keys_of(rows)[n] for n in (5, 11, 17)}
    assert not list(engine.dump_folder.glob("*")), "what was extracted again leaves the dump folder"


def test_adopt_of_another_layer_set_is_refused_as_a_whole_by_the_engine(
    tmp_path: Path, model: Path, engine: RunningEngine, earlier_rows: list[Row]
) -> None:
    llama, rows = Llama.load(model), earlier_rows[:24]
    write_speculators(tmp_path / "earlier", rows, [llama.forward(ids_s, (2, 3, 5, 8)) for ids_s, _ in rows])
    done = adopt_by_command(tmp_path / "earlier", "speculators", tmp_path / "store", model, "--url", engine.url)
    assert done.returncode == 2
    assert "all 5 samples extracted again differ" in done.stderr
    assert done.stderr.count("\n") == 1
    assert len(Store.open(tmp_path / "store")) == 0
    other = adopt_by_command(
        tmp_path / "earlier", "speculators", tmp_path / "other", model, "--url", engine.url, "--layers", "2", "3", "5", "8"
    )
    assert other.returncode == 2
    assert "the engine captures layers (2, 4, 5, 8)" in other.stderr


def test_adopt_of_post_norm_states_is_compared_with_an_engine_that_dumps_before_the_norm(
    tmp_path: Path, model: Path, engine: RunningEngine, earlier_rows: list[Row], earlier_states: list[NDArray[np.float32]]
) -> None:
    norm, rows = Checkpoint.open(model).final_norm(), earlier_rows[:12]
    states = [np.concatenate([each[:, :3], norm(each[:, 3])[:, None]], axis=1) for each in earlier_states[:12]]
    states[4][:, 3] *= 1.01
    write_specforge(tmp_path / "earlier", rows, states)
    done = adopt_by_command(tmp_path / "earlier", "specforge", tmp_path / "store", model, "--url", engine.url, "--rechecks", "12")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["adopted"], report["rejected"]) == (11, {"differs-from-engine": 1})
    assert report["findings"][0]["file"] == "data_4.ckpt"


def test_adopt_takes_back_a_hand_off_to_specforge_bit_for_bit(shared_world: World, tmp_path: Path) -> None:
    model, out = shared_world.model, tmp_path / "out"
    options = {"states_dtype": "store"}
    hand_off(trainer_named("specforge"), shared_world.dataset, shared_world.store, out, model=model, options=options)
    report, store = adopt(open_specforge(out, shared_world.dataset), tmp_path / "store", model)
    assert (report.read, report.adopted) == (60, 60)
    for sample in shared_world.dataset.samples():
        earlier, adopted = shared_world.store.read(sample.state_key).states_slh, store.read(sample.state_key).states_slh
        assert np.array_equal(adopted[:, :3], earlier[:, :3])
        assert np.allclose(adopted[:, 3], Checkpoint.open(model).final_norm()(earlier[:, 3]), rtol=1e-5)
