"""A real SGLang that the flow starts: in a process group of its own, ended with the run however the run ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import requests

from data_contracts.parameters import EngineParameters, StorageParameters
from drafter_data.embedded.launch import free_port
from drafter_data.engines.starting import running_engine
from drafter_data.workspace import Workspace
from flows.local.following import follow, send
from flows.local.processes import StartedProcess, descendants
from flows.local.services import Services
from tests.engines.comparing import assert_complete, extract, prompts_of
from tests.engines.servers import SGLANG_CPU_FLAGS, Engines, sglang_environment
from tests.flows.conftest import parameters, write_run

pytestmark = pytest.mark.real_engine

LIMIT_SECONDS = 600.0


@pytest.fixture(scope="module")
def services(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Generator[Services]:
    """A Prefect server and worker on a host where a flow finds SGLang; no other engine runs."""
    engines.stop()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sglang_environment().items():
            patch.setenv(name, value)
        started = Services(tmp_path_factory.mktemp("prefect"), free_port())
        started.start(print)
        yield started
        started.stop()


def own_engine(models: dict[str, Path], folder: Path) -> dict[str, Any]:
    """Parameters of an SGLang that the flow starts itself."""
    flags = [*SGLANG_CPU_FLAGS, "--dtype", "float32"]
    return {"kind": "sglang", "model": str(models["llama"]), "dump_folder": str(folder / "dumps"), "launch_flags": flags}


def started_run(services: Services, models: dict[str, Path], folder: Path) -> tuple[str, list[StartedProcess]]:
    """A flow run in mid-extraction, and all processes of it: the flow's own first, SGLang's among them."""
    work = folder / "work"
    run_id = send(services, "extract-100k", parameters(run_of(folder), work, engine=own_engine(models, folder)))
    wait_for(lambda: bool(list(work.glob("store/states/*/*.safetensors"))))
    worker = next(process for process in services.running() if process.name == "worker")
    family = descendants(worker.pid)
    assert any("launch_server" in command_of(process) for process in family), "SGLang is the run's own"
    assert len(family) > 4, "the flow's process, the supervisor, SGLang and its scheduler"
    return run_id, family


def run_of(folder: Path) -> Path:
    """A run long enough to be stopped in its middle."""
    return write_run(folder / "run.jsonl", 400, longest=1500)


def command_of(process: StartedProcess) -> str:
    """The command line of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def wait_for(happened: Callable[[], bool]) -> None:
    """Until something has happened."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_sglang_of_a_cancelled_flow_ends_with_it(services: Services, models: dict[str, Path], tmp_path: Path) -> None:
    run_id, family = started_run(services, models, tmp_path)
    state = {"type": "CANCELLING", "name": "Cancelling"}
    requests.post(f"{services.api}/flow_runs/{run_id}/set_state", json={"state": state}, timeout=30).raise_for_status()
    assert follow(services, run_id, print, timeout_seconds=LIMIT_SECONDS)["state_type"] == "CANCELLED"
    wait_for(lambda: not any(process.alive() for process in family))


def test_sglang_of_a_killed_flow_ends_with_it(services: Services, models: dict[str, Path], tmp_path: Path) -> None:
    _, family = started_run(services, models, tmp_path)
    flow = next(process for process in family if "prefect" in command_of(process) and "supervisor" not in command_of(process))
    started = descendants(flow.pid)
    assert any("launch_server" in command_of(process) for process in started)
    os.kill(flow.pid, signal.SIGKILL)
    wait_for(lambda: not any(process.alive() for process in started))


def test_sglang_of_a_flow_that_completes_ends_with_it(
    engines: Engines, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines.stop()
    for name, value in sglang_environment().items():
        monkeypatch.setenv(name, value)
    prompts = prompts_of(10, 1, 200, seed=13)
    settings = EngineParameters.model_validate(own_engine(models, tmp_path))
    with running_engine(settings, Workspace.of(StorageParameters(folder=str(tmp_path / "work")))) as started:
        report, dataset, store = extract(tmp_path, prompts, started)
        assert_complete(report, dataset, store)
        family = descendants(os.getpid())
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{started.url}/ready", timeout=5)
    assert not [process for process in family if process.alive() and "launch_server" in command_of(process)]
