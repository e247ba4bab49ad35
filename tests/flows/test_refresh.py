"""Nights: real scheduled runs at a short interval, beside runs by hand and after down-time."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from data_contracts.refresh import Night
from drafter_data.dataset import Dataset
from drafter_data.files import xxh3_of
from drafter_data.refresh.nights import read_nights
from drafter_data.store.store import Store
from drafter_data.trainers.folder import read_files_table
from drafter_data.validation import validate_store
from flows.local.following import artifact, follow, send
from flows.local.services import Services
from tests.flows.conftest import Door, call, parameters, write_run

pytestmark = [pytest.mark.operated, pytest.mark.timeout(600)]

LIMIT_SECONDS = 240.0
INTERVAL_SECONDS = 5


def deployment(services: Services) -> str:
    return str(call(services, "GET", "deployments/name/refresh/nightly-refresh")["id"])


@contextmanager
def scheduled(services: Services, given: Mapping[str, Any]) -> Generator[None]:
    """The deployment's runs come by themselves, as fast as nights never do."""
    ours = f"deployments/{deployment(services)}"
    schedule = {"schedule": {"interval": INTERVAL_SECONDS}, "active": True, "parameters": dict(given)}
    made = call(services, "POST", f"{ours}/schedules", [schedule])
    # A deployment that was just changed is looked at within seconds, others once a minute.
    call(services, "PATCH", ours, {"description": call(services, "GET", ours)["description"]})
    try:
        yield
    finally:
        call(services, "DELETE", f"{ours}/schedules/{made[0]['id']}")


def runs_of(services: Services, *states: str) -> list[dict[str, Any]]:
    """Runs of the deployment in given states, by start."""
    wanted = {"deployment_id": {"any_": [deployment(services)]}, "state": {"type": {"any_": list(states)}}}
    body = {"flow_runs": wanted, "limit": 200, "sort": "START_TIME_ASC"}
    return call(services, "POST", "flow_runs/filter", body)


def nights_until(work: Path, enough: Callable[[list[Night]], bool]) -> list[Night]:
    wait_for(lambda: enough(read_nights(work)))
    return read_nights(work)


def quiet(services: Services) -> None:
    """Until no run of the deployment is under way."""
    wait_for(lambda: not runs_of(services, "PENDING", "RUNNING"))


def add_run(runs: Path, name: str, rows: int, *, seed: int) -> Path:
    """A run that arrives finished."""
    folder = runs / name
    folder.mkdir(parents=True)
    write_run(folder / "part.jsonl", rows, seed=seed)
    (folder / "_SUCCESS").touch()
    return folder


def states_of(store: Path) -> dict[str, tuple[int, str]]:
    """Inode and checksum of each state file."""
    return {path.stem: (path.stat().st_ino, xxh3_of(path)) for path in sorted(store.glob("states/*/*.safetensors"))}


def test_three_nights_extract_all_then_only_what_is_new_then_nothing(services: Services, door: Door, tmp_path: Path) -> None:
    runs, work = tmp_path / "runs", tmp_path / "work"
    store = work / "store"
    add_run(runs, "first", 30, seed=1)
    (runs / "half").mkdir()
    write_run(runs / "half" / "part.jsonl", 10, seed=9)  # no marker, just written
    engine = {"url": door.url, "dump_folder": str(tmp_path / "dumps")}
    given = parameters("", work, engine=engine, input={"runs": [str(runs)], "hand_off": "delta"})

    with scheduled(services, given):
        first = nights_until(work, lambda nights: len(nights) >= 1)[0]
        before = states_of(store)
        asked_before = set(door.asked)
        assert (first.outcome, first.new_rows, first.extracted, first.failed) == ("extracted", 30, 30, 0)
        assert len(before) == 30
        version_1 = (work / "dataset").resolve()

        # As the generator's next run comes, with a row of the first whose mask alone is another.
        row = json.loads((runs / "first" / "part.jsonl").read_text().splitlines()[0])
        row["loss_mask"] = [0] * (len(row["input_ids"]) - 1) + [1]
        second_run = runs / "second"
        second_run.mkdir()
        write_run(second_run / "part.jsonl", 12, seed=2)
        with (second_run / "part.jsonl").open("a") as handle:
            handle.write(json.dumps({**row, "id": "masked"}) + "\n")
        (second_run / "_SUCCESS").touch()
        nights = nights_until(work, lambda nights: sum(one.outcome == "extracted" for one in nights) == 2)
        second = next(one for one in nights if one.outcome == "extracted" and one.new_rows != 30)
        assert (second.new_rows, second.reused, second.extracted, second.failed) == (13, 1, 12, 0)
        third = nights_until(work, lambda nights: nights[-1].outcome == "nothing new" and nights[-1].started_at > second.started_at)
    quiet(services)

    assert (third[-1].new_rows, third[-1].extracted, third[-1].tokens) == (0, 0, 0)
    assert third[-1].seconds < 30
    after = states_of(store)
    assert {key: after[key] for key in before} == before, "night 1's states: same inode, same checksum"
    new = set(after) - set(before)
    assert len(new) == 12
    opened = Store.open(store)
    asked = [key for key in door.asked if key in opened]
    assert len(asked) == len(set(asked)) == 42, "each prompt once, the masked row's not again"
    assert len(asked_before & set(before)) == 30
    version_2 = (work / "dataset").resolve()
    assert version_2 != version_1 and Dataset.open(version_1).record.rows == 30 and Dataset.open(version_2).record.rows == 43
    assert validate_store(opened, Dataset.open(version_2)).errors == 0
    names = {sample.run for sample in Dataset.open(version_2).samples()}
    assert names == {"first", "second"}, "the half-written run is left"
    handed = read_files_table(work / "handoff").column("sample_key").to_pylist()
    earlier = {sample.sample_key for sample in Dataset.open(version_1).samples()}
    assert len(handed) == 13 and not earlier & set(handed), "the delta"

    last = runs_of(services, "COMPLETED")[-1]
    assert "nothing new" in last["state"]["message"]
    table = artifact(services, last["id"], "nights")
    assert table is not None
    assert [row["extracted"] for row in table["rows"] if row["outcome"] == "extracted"] == [12, 30]

    # A half-written run is taken by the next night once its marker is there; the door shows that nothing else is asked.
    (runs / "half" / "_SUCCESS").touch()
    by_hand = send(services, "nightly-refresh", {**given, "input": {**given["input"], "hand_off": "grown"}})
    assert follow(services, by_hand, print, timeout_seconds=LIMIT_SECONDS)["state_type"] == "COMPLETED"
    assert read_nights(work)[-1].extracted == 10
    assert len(read_files_table(work / "handoff")) == 53

    # Runs that are removed leave their rows in the version, that night and the ones after.
    shutil.rmtree(runs / "first")
    for number, rows in (("third", 58), ("fourth", 63)):
        add_run(runs, number, 5, seed=len(number))
        by_hand = send(services, "nightly-refresh", {**given, "input": {**given["input"], "hand_off": "grown"}})
        assert follow(services, by_hand, print, timeout_seconds=LIMIT_SECONDS)["state_type"] == "COMPLETED"
        assert Dataset.open((work / "dataset").resolve()).record.rows == rows


def test_nights_beside_a_long_run_by_hand_do_not_overlap_it_and_a_backlog_is_one_run(
    services: Services, door: Door, tmp_path: Path
) -> None:
    runs, work = tmp_path / "runs", tmp_path / "work"
    add_run(runs, "first", 40, seed=3)
    engine = {"url": door.url, "dump_folder": str(tmp_path / "dumps")}
    given = parameters(runs / "first", work, engine=engine)
    nightly = {**given, "input": {"runs": [str(runs)]}}
    by_hand = send(services, "extract-100k", given)
    wait_for(lambda: sum(path.read_bytes().count(b"\n") for path in work.glob("store/receipts/*.jsonl")) >= 5)
    door.open.clear()
    add_run(runs, "second", 10, seed=4)
    with scheduled(services, nightly):
        wait_for(lambda: len([one for one in runs_of(services, "COMPLETED") if one["state_name"] == "Skipped"]) >= 1)
        assert not read_nights(work), "no night has begun"
        # Down-time: nobody takes runs, several become due.
        call(services, "PATCH", "work_pools/local", {"is_paused": True})
        quiet(services)
        try:
            door.open.set()
            ended = follow(services, by_hand, print, timeout_seconds=LIMIT_SECONDS)
            assert ended["state_type"] == "COMPLETED"
            wait_for(lambda: len(overdue(services)) >= 3)
            backlog = {one["id"] for one in overdue(services)}
        finally:
            call(services, "PATCH", "work_pools/local", {"is_paused": False})
        nights_until(work, lambda nights: len(nights) >= 1)
        quiet(services)
        wait_for(lambda: not backlog & {one["id"] for one in runs_of(services, "SCHEDULED", "PENDING", "RUNNING")})
    quiet(services)
    fates = [one["state_type"] for one in runs_of(services, "COMPLETED", "CANCELLED") if one["id"] in backlog]
    print(f"backlog of {len(backlog)}: {sorted(fates)}")
    assert fates.count("COMPLETED") == 1 and fates.count("CANCELLED") == len(backlog) - 1
    extracted = [one for one in read_nights(work) if one.outcome == "extracted"]
    assert [(one.new_rows, one.reused, one.extracted) for one in extracted] == [(50, 40, 10)]
    hand_ended = seconds_of(ended["end_time"])
    assert all(one.started_at >= hand_ended for one in read_nights(work)), "0 overlap"


def overdue(services: Services) -> list[dict[str, Any]]:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return [one for one in runs_of(services, "SCHEDULED") if one["expected_start_time"] < stamp]


def seconds_of(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


@pytest.fixture(autouse=True)
def nobody_else(services: Services) -> None:
    quiet(services)


def wait_for(happened: Callable[[], bool]) -> None:
    """Until something has happened."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.1)
