"""Several hosts: each a worker with an engine and a dump folder of its own, one shared queue, one store."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests

from data_contracts.parameters import EngineParameters, ExtractionParameters
from drafter_data.dataset import Dataset
from drafter_data.embedded.launch import SINGLE_THREADED, embedded_command, free_port
from drafter_data.extraction.campaign import run_campaign
from drafter_data.planning import chunk_rows, load_plan
from drafter_data.store.fsck import fsck
from drafter_data.store.store import Store
from drafter_data.validation import validate_store
from flows.local.following import follow, send
from flows.local.processes import StartedProcess, descendants, start, stop
from flows.local.services import CHECKOUT, PREFECT, Services
from tests.flows.conftest import Door, call, parameters, write_run

pytestmark = [pytest.mark.operated, pytest.mark.timeout(600)]

LIMIT_SECONDS = 240.0
LEASE_SECONDS = 4.0
ROWS, CHUNKS = 480, 8
US_PER_TOKEN = 3000.0
"""A chunk of 60 samples of 49 tokens takes its engine 9 s."""


@dataclass
class Host:
    """What one host runs."""

    name: str
    url: str
    dump_folder: Path
    processes: list[StartedProcess]

    def die(self) -> None:
        """Worker, flow process and engine at once, by SIGKILL, as in a power cut."""
        family = [one for process in self.processes for one in [process, *descendants(process.pid)]]
        for process in family:
            os.kill(process.pid, signal.SIGKILL)


def worker(services: Services, name: str, url: str, dump_folder: Path, log: Path) -> StartedProcess:
    """A worker that takes one chunk at a time, with its host's own configuration."""
    own = {
        "DRAFTER_DATA_ENGINE_URL": url,
        "DRAFTER_DATA_DUMP_FOLDER": str(dump_folder),
        "DRAFTER_DATA_HOST_NAME": name,
        "DRAFTER_DATA_LEASE_SECONDS": str(LEASE_SECONDS),
    }
    argv = [PREFECT, "worker", "start", "--pool", "hosts", "--work-queue", "chunks", "--limit", "1", "--name", name]
    return start(name, argv, env=services.environment() | own, log=log, cwd=CHECKOUT)


@pytest.fixture(scope="module")
def hosts_pool(services: Services) -> Iterator[Services]:
    """The deployment `extract-chunk` in a pool that only this module's workers serve."""
    services.prefect(["work-pool", "create", "hosts", "--type", "process", "--overwrite"])
    found = call(services, "GET", "deployments/name/extract-chunk/extract-chunk")
    place(services, found["id"], "hosts")
    yield services
    place(services, found["id"], found["work_pool_name"])


def place(services: Services, deployment_id: str, pool: str) -> None:
    call(services, "PATCH", f"deployments/{deployment_id}", {"work_pool_name": pool, "work_queue_name": "chunks"})


@pytest.fixture
def timed_model(tmp_path: Path) -> Path:
    """A checkpoint without lm_head (the timed engine's log-probabilities prove nothing), with a final norm for the hand-off."""
    folder = tmp_path / "timed-model"
    folder.mkdir()
    config = {"hidden_size": 64, "num_hidden_layers": 8, "vocab_size": 1024, "dtype": "bfloat16", "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}}).encode()
    header += b" " * (-len(header) % 8)
    weight = np.random.default_rng(0).uniform(0.2, 5.0, 64).astype("<f4").tobytes()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + weight)
    return folder


def timed_engine(model: Path, dump_folder: Path, log: Path, us_per_token: float) -> tuple[StartedProcess, str]:
    """An engine that takes a set time a token."""
    dump_folder.mkdir(mode=0o700)
    port = free_port()
    flags = ["--timed", "--hidden-size", "64", "--num-layers", "8", "--timed-base-ms", "1", "--skip-server-warmup"]
    argv = embedded_command(
        model=model, dump_folder=dump_folder, port=port, flags=[*flags, "--timed-us-per-token", str(us_per_token)]
    )
    process = start("engine", argv, env=os.environ | SINGLE_THREADED, log=log, cwd=CHECKOUT)
    return process, f"http://127.0.0.1:{port}"


@contextmanager
def three_hosts(services: Services, model: Path, folder: Path) -> Generator[list[Host]]:
    """Three hosts with engines of equal speed."""
    ram = Path(tempfile.mkdtemp(prefix="dd-test-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    hosts: list[Host] = []
    try:
        for name in ("host-a", "host-b", "host-c"):
            engine, url = timed_engine(model, ram / name, folder / f"{name}-engine.log", US_PER_TOKEN)
            hosts.append(Host(name, url, ram / name, [engine]))
        for host in hosts:
            host.processes.insert(0, worker(services, host.name, host.url, host.dump_folder, folder / f"{host.name}.log"))
        wait_for(lambda: workers_online(services) >= {host.name for host in hosts})
        yield hosts
    finally:
        for host in hosts:
            for process in host.processes:
                stop(process)
        shutil.rmtree(ram)


def workers_online(services: Services) -> set[str]:
    found = call(services, "POST", "work_pools/hosts/workers/filter", {})
    return {one["name"] for one in found if one["status"] == "ONLINE"}


def children(services: Services, store: Path) -> list[dict[str, Any]]:
    """All runs of `extract-chunk` for a store, in the order in which they were sent."""
    found: list[dict[str, Any]] = []
    while True:
        body = {
            "flows": {"name": {"any_": ["extract-chunk"]}},
            "limit": 200,
            "offset": len(found),
            "sort": "EXPECTED_START_TIME_ASC",
        }
        page: list[dict[str, Any]] = call(services, "POST", "flow_runs/filter", body)
        found += page
        if len(page) < 200:
            return [one for one in found if one["parameters"]["chunk"]["store"] == str(store)]


def reference(model: Path, dataset: Path, folder: Path) -> dict[str, str]:
    """Checksum by state key, from one engine alone and without Prefect."""
    engine, url = timed_engine(model, folder / "dumps", folder / "engine.log", 1.0)
    try:
        wait_for(lambda: answers(f"{url}/ready"))
        settings = EngineParameters(url=url, model=str(model), dump_folder=str(folder / "dumps"))
        run_campaign(dataset, folder / "store", settings, ExtractionParameters(recheck_samples=0))
    finally:
        stop(engine)
    return {one.state_key: one.xxh3 for one in Store.open(folder / "store").receipts()}


def answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=5).ok
    except requests.RequestException:
        return False


def test_three_hosts_of_which_one_is_killed_bring_every_state_once_in_the_time_of_the_two_left(
    hosts_pool: Services, timed_model: Path, tmp_path: Path
) -> None:
    run, work = write_run(tmp_path / "run.jsonl", ROWS, longest=90), tmp_path / "work"
    store = work / "store"
    on_hosts = {"fan_out": "deployment", "chunk_samples": ROWS // CHUNKS, "in_flight": 8}
    with three_hosts(hosts_pool, timed_model, tmp_path) as hosts:
        engine = {"url": hosts[0].url, "dump_folder": str(hosts[0].dump_folder), "model": str(timed_model)}
        parent = send(hosts_pool, "extract-100k", parameters(run, work, engine=engine, extraction=on_hosts))
        wait_for(lambda: receipts_by_host(hosts_pool, store, "RUNNING") >= 3)
        hosts[2].die()
        ended = follow(hosts_pool, parent, print, timeout_seconds=LIMIT_SECONDS)

    assert ended["state_type"] == "COMPLETED", ended["state"]["message"]
    dataset = Dataset.open(work / "dataset")
    opened = Store.open(store)
    report = validate_store(opened, dataset)
    assert (report.samples, report.errors, report.missing) == (ROWS, 0, 0)
    lines = Counter(line.key for line in opened.receipt_lines())
    assert set(lines.values()) == {1}, "no prompt twice"
    assert {one.state_key: one.xxh3 for one in opened.receipts()} == reference(
        timed_model, work / "dataset", new(tmp_path / "alone")
    )
    assert not opened.leases()
    assert not fsck(opened).problems

    runs = children(hosts_pool, store)
    lost = [one for one in runs if one["state_type"] == "CRASHED"]
    done = [one for one in runs if one["state_type"] == "COMPLETED"]
    assert len(load_plan(store, dataset.record.dataset_id).chunks) == CHUNKS
    assert (len(done), len(lost), len(runs)) == (CHUNKS, 1, CHUNKS + 1)
    assert lost[0]["state"]["message"].startswith("host lost: its lease ended")
    by = Counter(one["state"]["message"].rpartition("by ")[2] for one in done)
    before_it_died = by.pop("host-c", 0)  # what it had ended by then, on a slow machine
    assert set(by) == {"host-a", "host-b"} and before_it_died <= 1
    check_wall(runs, done, by)


def check_wall(runs: Sequence[dict[str, Any]], done: Sequence[dict[str, Any]], by: Counter[str]) -> None:
    """Against what two hosts need at the pace of these two: rounds of two chunks, each from one start to the next."""
    left = sum(by.values())
    mine = {host: [one for one in done if one["state"]["message"].endswith(f"by {host}")] for host in by}
    starts = [sorted(seconds(one["start_time"]) for one in runs_of) for runs_of in mine.values()]
    paces = [later - earlier for times in starts for earlier, later in pairwise(times)]
    begun, ended = min(seconds(one["start_time"]) for one in runs), max(seconds(one["end_time"]) for one in done)
    need = math.ceil(left / 2) * statistics.median(paces)
    print(f"wall {ended - begun:.1f} s, two hosts need {need:.1f} s: {(ended - begun) / need:.2f}")
    assert ended - begun < 1.25 * need


def receipts_by_host(services: Services, store: Path, state: str) -> int:
    """Chunks whose runs are in a state and that have brought something."""
    running = [one for one in children(services, store) if one["state_type"] == state]
    plans = list(store.glob("plans/*/plan.json"))
    if not plans:
        return 0
    keys = {chunk.index: chunk.key for chunk in load_plan(store, plans[0].parent.name).chunks}
    return sum(bool(list(store.glob(f"receipts/{keys[one['parameters']['chunk']['index']]}.*"))) for one in running)


def test_child_deleted_is_sent_again_and_one_retried_alone_to_green_is_not(
    hosts_pool: Services, door: Door, model: Path, tmp_path: Path
) -> None:
    run, work = write_run(tmp_path / "run.jsonl", 24), tmp_path / "work"
    store = work / "store"
    door.refuses = lambda key: key in keys_of_chunk(store, 1)
    of_parent = {"ENGINE_URL": door.url, "DUMP_FOLDER": str(tmp_path / "dumps"), "MODEL": str(model)}
    given = parameters(run, work, extraction={"fan_out": "deployment"})
    parent = send_to_host(hosts_pool, given, of_parent)
    wait_for(lambda: len(children(hosts_pool, store)) == 3)
    deleted = next(one["id"] for one in children(hosts_pool, store) if one["parameters"]["chunk"]["index"] == 0)
    call(hosts_pool, "DELETE", f"flow_runs/{deleted}")
    wait_for(lambda: len(children(hosts_pool, store)) == 3)
    on_host = worker(hosts_pool, "host-d", door.url, tmp_path / "dumps", tmp_path / "host-d.log")
    try:
        first = follow(hosts_pool, parent, print, timeout_seconds=LIMIT_SECONDS)
        assert first["state"]["message"].startswith("gate-closed: ")
        sent = children(hosts_pool, store)
        assert Counter(one["state_type"] for one in sent) == {"COMPLETED": 2, "FAILED": 1}
        failed = next(one for one in sent if one["state_type"] == "FAILED")
        assert failed["parameters"]["chunk"]["index"] == 1
        assert not {"url", "dump_folder"} & set(failed["parameters"]["engine"])
        assert failed["parameters"]["engine"]["model"] is None, "the run names none, and that of its host is its host's own"
        assert [one["name"].endswith(", sent 2 times") for one in sent if one["parameters"]["chunk"]["index"] == 0] == [True]
        assert "chunk 1 of " in failed["name"]

        door.refuses = lambda key: False
        retry(hosts_pool, failed["id"])
        assert follow(hosts_pool, failed["id"], print, timeout_seconds=LIMIT_SECONDS)["state_type"] == "COMPLETED"
        door.asked = []
        retry(hosts_pool, parent)
        assert follow(hosts_pool, parent, print, timeout_seconds=LIMIT_SECONDS)["state_type"] == "COMPLETED"
    finally:
        stop(on_host)
    assert [one["id"] for one in children(hosts_pool, store)] == [one["id"] for one in sent], "no second child"
    rows = {sample.state_key for sample in Dataset.open(work / "dataset").samples()}
    assert not rows & set(door.asked), "nothing was extracted again"
    assert validate_store(Store.open(store), Dataset.open(work / "dataset")).errors == 0
    assert (work / "handoff" / "manifest.json").is_file()


def send_to_host(services: Services, given: dict[str, Any], of_host: dict[str, str]) -> str:
    """A run of the main job by a host with a configuration of its own."""
    found = call(services, "GET", "deployments/name/extract/extract-100k")
    env = {f"DRAFTER_DATA_{name}": value for name, value in of_host.items()}
    body = {"parameters": given, "job_variables": {"env": env}, "state": {"type": "SCHEDULED"}}
    return call(services, "POST", f"deployments/{found['id']}/create_flow_run", body)["id"]


def keys_of_chunk(store: Path, index: int) -> set[str]:
    plans = list(store.glob("plans/*/plan.json"))
    return {one.state_key for one in chunk_rows(store, plans[0].parent.name, index)} if plans else set()


def retry(services: Services, run_id: str) -> None:
    """As the button in the UI does."""
    count = call(services, "GET", f"flow_runs/{run_id}")["run_count"]
    state = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}
    assert call(services, "POST", f"flow_runs/{run_id}/set_state", {"state": state, "force": True})["status"] == "ACCEPT"
    wait_for(lambda: call(services, "GET", f"flow_runs/{run_id}")["run_count"] == count + 1)


def new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


def wait_for(happened: Callable[[], bool]) -> None:
    """Until something has happened."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.1)
