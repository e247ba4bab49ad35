"""Processes that are started here, written down, and ended by what was written: id AND start time, never by name."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from data_contracts.record import Record

STOP_SECONDS = 20.0


class StartedProcess(Record):
    """The leader of a process group of its own. `start_ticks` (clock ticks since boot) tells it from a later process of its id."""

    name: str
    pid: int
    start_ticks: int

    def alive(self) -> bool:
        """Whether it still runs (a zombie does not)."""
        found = _stat(self.pid)
        return found is not None and found[1] == self.start_ticks and found[2] != "Z"


def start(name: str, argv: Sequence[str], *, env: Mapping[str, str], log: Path, cwd: Path) -> StartedProcess:
    """Starts `argv` in a session of its own, its output at the end of `log`."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            list(argv),
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    found = _stat(process.pid)
    assert found is not None  # it is our child and not yet waited for
    return StartedProcess(name=name, pid=process.pid, start_ticks=found[1])


def stop(process: StartedProcess) -> None:
    """Ends a process, its group and all that it started (flow runs have sessions of their own): those first, then itself."""
    if not process.alive():
        _reap(process.pid)
        return
    started = descendants(process.pid)
    _end([one for one in started if _group(one.pid) == one.pid])
    _end([process])
    _end([one for one in started if one.alive()])
    _reap(process.pid)


def _end(processes: Sequence[StartedProcess]) -> None:
    """SIGTERM to each one's group, SIGKILL to what is still there after STOP_SECONDS."""
    for number, patience in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, 5.0)):
        living = [process for process in processes if process.alive()]
        for process in living:
            with suppress(ProcessLookupError):
                if _group(process.pid) == process.pid:
                    os.killpg(process.pid, number)
                else:
                    os.kill(process.pid, number)
        deadline = time.monotonic() + patience
        while any(process.alive() for process in living) and time.monotonic() < deadline:
            for process in living:
                _reap(process.pid)
            time.sleep(0.05)


def descendants(pid: int) -> list[StartedProcess]:
    """All that a process has started, directly or not, as far as it is still its child."""
    parents: dict[int, list[StartedProcess]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (found := _stat(int(entry.name))) is not None:
            child = StartedProcess(name=f"of {pid}", pid=int(entry.name), start_ticks=found[1])
            parents.setdefault(found[0], []).append(child)
    found_all: list[StartedProcess] = []
    level = parents.get(pid, [])
    while level:
        found_all += level
        level = [child for one in level for child in parents.get(one.pid, [])]
    return found_all


def _stat(pid: int) -> tuple[int, int, str] | None:
    """(parent, start ticks, state) of a process; None when there is none. Fields as in proc_pid_stat(5)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1]), int(fields[19]), fields[0]


def _group(pid: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None


def _reap(pid: int) -> None:
    """Collects a child that has ended; one that is not ours belongs to its own parent."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
