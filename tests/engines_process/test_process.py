"""EngineProcess: ready, refused with the log's tail, and gone as a whole group however its starter ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests

from drafter_data.embedded.launch import free_port
from drafter_data.engines.process import EngineProcess
from drafter_data.errors import EngineLost

SERVER = """
import http.server, subprocess, sys, signal
if "stubborn" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])
open(sys.argv[2], "w").write(str(child.pid))
print("serving", flush=True)
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), H).serve_forever()
"""


def server(tmp_path: Path, *flags: str, script: str = SERVER, timeout: float = 20) -> EngineProcess:
    port = free_port()
    argv = [sys.executable, "-c", script, str(port), str(tmp_path / "grandchild"), *flags]
    return EngineProcess(
        argv, env={"MARK": "1"}, log=tmp_path / "log", ready_url=f"http://127.0.0.1:{port}/", ready_timeout_seconds=timeout
    )


def gone(pid: int, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.02)
    return False


def group_members(group: int) -> list[int]:
    members = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] not in "ZX":
                members.append(int(folder.name))
    return members


def test_process_stop_ends_the_whole_group(tmp_path: Path) -> None:
    with server(tmp_path) as engine:
        assert engine.alive()
        assert requests.get(engine._ready_url, timeout=5).status_code == 200
        assert os.getpgid(engine.pid) == engine.pid != os.getpgid(0)
        grandchild = int((tmp_path / "grandchild").read_text())
        assert len(group_members(engine.pid)) == 3
    assert not engine.alive()
    assert group_members(engine.pid) == []
    assert gone(grandchild)
    assert "serving" in (tmp_path / "log").read_text()
    engine.stop()  # twice is harmless


def test_process_stubborn_server_is_killed_after_grace(tmp_path: Path) -> None:
    engine = server(tmp_path, "stubborn")
    engine.start()
    started = time.monotonic()
    engine.stop(grace_seconds=0.3)
    assert time.monotonic() - started < 5
    assert group_members(engine.pid) == []


def test_process_exit_before_ready_raises_with_log_tail(tmp_path: Path) -> None:
    engine = server(tmp_path, script="import sys; print('no such model here', file=sys.stderr); sys.exit(3)")
    with pytest.raises(EngineLost, match="no such model here") as caught:
        engine.start()
    assert caught.value.reason == "engine-exited"
    assert not engine.alive()


def test_process_port_of_another_server_is_not_taken_for_ready(tmp_path: Path) -> None:
    with server(tmp_path) as first:
        second = EngineProcess(["sleep", "60"], log=tmp_path / "log2", ready_url=first._ready_url, ready_timeout_seconds=5)
        with pytest.raises(EngineLost, match="is taken") as caught:
            second.start()
        assert caught.value.reason == "port-taken"
        assert first.alive()


def test_process_missing_program_raises_engine_lost(tmp_path: Path) -> None:
    engine = EngineProcess(
        ["/no/such/engine"], env=None, log=tmp_path / "log", ready_url="http://127.0.0.1:9/", ready_timeout_seconds=20
    )
    with pytest.raises(EngineLost, match="No such file"):
        engine.start()


def test_process_never_ready_times_out_and_leaves_nothing(tmp_path: Path) -> None:
    engine = server(tmp_path, script="import time; time.sleep(600)", timeout=0.5)
    with pytest.raises(EngineLost, match="not ready") as caught:
        engine.start()
    assert caught.value.reason == "engine-not-ready"
    assert group_members(engine.pid) == []


@pytest.mark.parametrize("in_thread", [False, True])
def test_process_group_dies_with_sigkilled_parent_but_not_with_its_thread(tmp_path: Path, in_thread: bool) -> None:
    script = f"""
import sys, threading, time
sys.path.insert(0, {str(Path.cwd())!r})
from pathlib import Path
from tests.engines_process.test_process import server
engine = server(Path({str(tmp_path)!r}))
if {in_thread}:
    thread = threading.Thread(target=engine.start); thread.start(); thread.join(); time.sleep(1)
else:
    engine.start()
print(engine.pid, engine.alive(), flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    group, alive = parent.stdout.readline().split()
    assert alive == "True"
    assert len(group_members(int(group))) == 3
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert gone(int(group))
    assert group_members(int(group)) == []
    assert gone(int((tmp_path / "grandchild").read_text()))
