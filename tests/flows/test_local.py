"""What is started for the demo and for `make up` is ended by its record, with all that it started, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drafter_data.embedded.launch import free_port
from drafter_data.errors import UsageError
from flows.local.processes import StartedProcess, descendants, start, stop
from flows.local.services import CHECKOUT, Services, StartedServices

# A parent whose child has a session of its own, as a worker's flow runs have; the child ignores SIGTERM.
FAMILY = """
import subprocess, sys, time
child = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
time.sleep(600)
"""


def wait_for_text(path: Path, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in path.read_text():
        assert time.monotonic() < deadline, f"{path} has no {text!r}"
        time.sleep(0.02)


@pytest.fixture
def bystander():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_stop_ends_the_process_and_what_it_started_in_other_sessions(
    tmp_path: Path, bystander: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.local.processes.STOP_SECONDS", 0.5)
    parent = start("parent", [sys.executable, "-c", FAMILY], env=os.environ, log=tmp_path / "log", cwd=tmp_path)
    wait_for_text(tmp_path / "log", "up")
    (child,) = descendants(parent.pid)
    assert os.getpgid(child.pid) != parent.pid

    stop(parent)

    assert not parent.alive()
    assert not child.alive()
    assert bystander.poll() is None


def test_stop_leaves_a_later_process_of_the_recorded_id_alone(bystander: subprocess.Popen[bytes]) -> None:
    ticks = int(Path(f"/proc/{bystander.pid}/stat").read_text().rpartition(")")[2].split()[19])
    earlier = StartedProcess(name="server", pid=bystander.pid, start_ticks=ticks - 1)
    assert not earlier.alive()
    stop(earlier)
    assert bystander.poll() is None


def test_down_ends_what_the_record_names_and_forgets_it(tmp_path: Path, bystander: subprocess.Popen[bytes]) -> None:
    process = start(
        "server", [sys.executable, "-c", "import time; time.sleep(600)"], env=os.environ, log=tmp_path / "log", cwd=tmp_path
    )
    services = Services(tmp_path, free_port())
    record = StartedServices(port=services.port, processes=(process,))
    (tmp_path / "processes.json").write_text(record.model_dump_json())
    assert [one.name for one in services.running()] == ["server"]
    assert services.stop() == ["server"]
    assert services.stop() == []
    assert not process.alive()
    assert bystander.poll() is None


def test_up_on_a_taken_port_says_so_and_starts_nothing(services: Services, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"port {services.port} is in use"):
        Services(tmp_path / "second", services.port).start(print)
    assert not (tmp_path / "second" / "processes.json").exists()


def test_interrupted_demo_ends_everything_that_it_started(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flows.local", "demo", "--folder", str(tmp_path)]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT)
    record = tmp_path / "prefect" / "processes.json"
    deadline = time.monotonic() + 120
    while not record.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    started = StartedServices.model_validate_json(record.read_bytes()).processes
    assert [one.alive() for one in started] == [True]
    demo.send_signal(signal.SIGTERM)
    demo.communicate(timeout=120)
    assert demo.returncode == 130
    assert not any(one.alive() for one in started)
    assert not record.exists()
