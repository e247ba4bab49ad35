"""What the trainers' readers let through is put into a store, behind its back, and must stop at the hand-off by name.

Each defect comes twice: as a file that no longer fits its receipt, and with a receipt forged to fit (a tool that writes both).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save

from data_contracts.dataset import RECORD_FILE
from drafter_data.errors import GateClosed, InputError
from drafter_data.files import xxh3_of
from drafter_data.store.store import Store
from drafter_data.trainers.folder import read_files_table
from drafter_data.trainers.handoff import hand_off
from drafter_data.trainers.registry import trainer_named
from tests.store.making import write_dataset
from tests.trainers.world import Row, World, identity_of_model, rewrite

EXCLUDING = {"max_error_rate": "1"}
Change = Callable[[NDArray[np.float32], NDArray[np.int64], World], bytes]


def serialised(states: NDArray[np.generic], ids: NDArray[np.generic]) -> bytes:
    """A safetensors file in the store's own form."""
    from drafter_data.safetensors_file import NUMPY_DTYPES, state_header

    name = next((name for name in ("F32", "F16") if np.dtype(NUMPY_DTYPES[name]) == states.dtype), None)
    if name is None or ids.dtype != np.int64:
        return save({"token_ids": np.ascontiguousarray(ids), "hidden_states": np.ascontiguousarray(states)})
    return state_header(states.shape, name) + ids.tobytes() + np.ascontiguousarray(states).tobytes()


def with_value(value: float) -> Change:
    def change(states: NDArray[np.float32], ids: NDArray[np.int64], _: World) -> bytes:
        states[len(states) // 2, 1, 7] = value
        return serialised(states, ids)

    return change


def normed(states: NDArray[np.float32], ids: NDArray[np.int64], world: World) -> bytes:
    from drafter_data.checkpoints import Checkpoint

    states[:, -1] = Checkpoint.open(world.model).final_norm()(states[:, -1])
    return serialised(states, ids)


def zero_row(states: NDArray[np.float32], ids: NDArray[np.int64], _: World) -> bytes:
    states[2, 1] = 0
    return serialised(states, ids)


@dataclass
class Defect:
    """How a state goes wrong, and the reasons that may be given: with its own receipt, and with a forged one."""

    change: Change
    caught_as: set[str]
    forged_as: set[str]


DEFECTS = {
    "nan": Defect(with_value(float("nan")), {"not-finite"}, {"not-finite"}),
    "inf": Defect(with_value(float("inf")), {"not-finite"}, {"not-finite"}),
    "one-row-short": Defect(lambda s, ids, _: serialised(s[:-1], ids[:-1]), {"state-size"}, {"row-count"}),
    "states-one-row-short": Defect(
        lambda s, ids, _: save({"token_ids": ids, "hidden_states": s[:-1].copy()}), {"state-size"}, {"row-count"}
    ),
    "other-token-ids": Defect(lambda s, ids, _: serialised(s, np.roll(ids, 1)), {"token-ids"}, {"token-ids"}),
    "layers-in-another-order": Defect(lambda s, ids, _: serialised(s[:, [2, 1, 0, 3]], ids), {"checksum"}, {"layer-order"}),
    "normed-twice": Defect(normed, {"wrong-norm"}, {"wrong-norm"}),
    "cut-short": Defect(lambda s, ids, _: serialised(s, ids)[:-100], {"state-size"}, {"safetensors-malformed"}),
    "half-precision": Defect(lambda s, ids, _: serialised(s.astype(np.float16), ids), {"state-size"}, {"dtype"}),
    "int32-ids": Defect(lambda s, ids, _: serialised(s, ids.astype(np.int32)), {"state-size"}, {"dtype"}),
    "bool-states": Defect(lambda s, ids, _: serialised(s > 0, ids), {"state-size"}, {"dtype"}),
    "zero-row": Defect(zero_row, {"zero-rows"}, {"zero-rows"}),
}  # fmt: skip


def forge_receipt(store: Store, state_key: str) -> None:
    """Appends a receipt that fits whatever lies in the state's file now."""
    receipt, path = store.find(state_key), store.path_of(state_key)
    assert receipt is not None
    store._receipts.write(
        [receipt.model_copy(update={"bytes": path.stat().st_size, "xxh3": xxh3_of(path), "committed_at": path.stat().st_mtime + 1})]
    )
    store._receipts.sync()


def damage(world: World, row: int, name: str) -> Path:
    """Puts a defect into a row's state, behind the store's back; returns its file."""
    path = world.state_path(row)
    tensors = load_file(path)
    rewrite(path, DEFECTS[name].change(tensors["hidden_states"].copy(), tensors["token_ids"].copy(), world))
    return path


@pytest.mark.parametrize("trainer", ["speculators", "ridge"])
@pytest.mark.parametrize("forged", [False, True], ids=["own-receipt", "forged-receipt"])
@pytest.mark.parametrize("name", DEFECTS)
def test_defect_in_a_store_is_excluded_by_name_and_never_handed_off(
    name: str, forged: bool, trainer: str, world: World, tmp_path: Path
) -> None:
    defect, row = DEFECTS[name], 5
    path = damage(world, row, name)
    if forged:
        forge_receipt(world.store, path.stem)
    manifest = hand_off(trainer_named(trainer), world.dataset, world.store, tmp_path / "out", model=world.model, options=EXCLUDING)
    (exclusion,) = manifest.exclusions
    assert exclusion.sample_key == world.key(row)
    assert exclusion.reason in (defect.forged_as if forged else defect.caught_as), exclusion.detail
    assert exclusion.sample_key[:12] in exclusion.detail
    keys = read_files_table(tmp_path / "out").column("sample_key").to_pylist()
    assert len(keys) == 23
    assert exclusion.sample_key not in keys
    assert not any(link.samefile(path) for link in (tmp_path / "out/states").iterdir())
    assert len(datasets.load_from_disk(str(tmp_path / "out/data"))) == 23


@pytest.mark.parametrize("name", DEFECTS)
def test_defect_in_a_store_refuses_the_hand_off_by_default_and_names_the_sample(name: str, world: World, tmp_path: Path) -> None:
    damage(world, 5, name)
    with pytest.raises(GateClosed, match=world.key(5)[:12]):
        hand_off(trainer_named("speculators"), world.dataset, world.store, tmp_path / "out", model=world.model)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("mask_of", "reason"),
    [
        (np.zeros_like, "no-supervised-token"),
        (lambda mask: np.eye(1, len(mask), dtype=np.uint8)[0], "no-supervised-token"),
        (lambda mask: mask[:-1], "mask-length"),
        (lambda mask: mask * 2, "mask-values"),
    ],
    ids=["all-zero", "first-token-only", "one-short", "two-for-one"],
)
def test_loss_mask_that_trains_wrongly_is_excluded_by_name(
    mask_of: Callable[[NDArray[np.uint8]], NDArray[np.uint8]], reason: str, world: World, tmp_path: Path, answers: list[Row]
) -> None:
    rows = list(answers[:24])
    rows[3] = (rows[3][0], mask_of(rows[3][1]))
    damaged = write_dataset(tmp_path / "damaged", rows)
    manifest = hand_off(trainer_named("speculators"), damaged, world.store, tmp_path / "out", model=world.model, options=EXCLUDING)
    assert [exclusion.reason for exclusion in manifest.exclusions] == [reason]
    assert manifest.samples == 23


def test_state_that_is_missing_or_given_as_excluded_is_listed_with_its_reason(world: World, tmp_path: Path) -> None:
    from data_contracts.plan import Exclusion

    given = Exclusion(sample_key=world.key(1), state_key="00" * 20, kind="excluded", reason="too-long", detail="9,000 tokens")
    world.state_path(2).unlink()
    manifest = hand_off(
        trainer_named("ridge"),
        world.dataset,
        world.store,
        tmp_path / "out",
        model=world.model,
        exclusions=[given],
        options=EXCLUDING,
    )
    assert {(each.kind, each.reason) for each in manifest.exclusions} == {("excluded", "too-long"), ("failed", "state-missing")}
    assert manifest.samples == 22


def test_store_without_the_states_is_refused_with_the_reasons_counted(world: World, tmp_path: Path) -> None:
    empty = Store.open(tmp_path / "empty", identity_of_model(world.model))
    with pytest.raises(InputError, match="24 state-missing"):
        hand_off(trainer_named("speculators"), world.dataset, empty, tmp_path / "out", model=world.model, options=EXCLUDING)
    assert not (tmp_path / "out").exists()


def test_token_outside_the_vocabulary_is_excluded(world: World, tmp_path: Path, answers: list[Row]) -> None:
    rows = list(answers[:24])
    ids = rows[0][0].copy()
    ids[-1] = 70_000
    rows[0] = (ids, rows[0][1])
    record = json.loads((world.dataset.folder / RECORD_FILE).read_text())
    assert record["rows"] == 24
    damaged = write_dataset(tmp_path / "damaged", rows)
    manifest = hand_off(trainer_named("ridge"), damaged, world.store, tmp_path / "out", model=world.model, options=EXCLUDING)
    assert [exclusion.reason for exclusion in manifest.exclusions] == ["token-out-of-vocabulary"]
