"""Starts real engines for the tests: one at a time, and once a configuration as long as its tests stand together."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests

from data_contracts.parameters import EngineParameters
from drafter_data.embedded.launch import free_port
from drafter_data.engines.launch import LaunchCommand
from drafter_data.engines.launch_sglang import PYTHON_VARIABLE, sglang_command
from drafter_data.engines.launch_vllm import vllm_command
from drafter_data.engines.process import EngineProcess
from tests.engines.environments import HERE, SHIM, sglang_python, vllm_python

READY_SECONDS = 800.0
RAM_DISK = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")
SGLANG_CPU_FLAGS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--max-total-tokens", "16384", "--skip-server-warmup",
)  # fmt: skip
# One thread that sleeps while it waits: on a busy machine spinning threads are many times slower.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
# Without compilation at the first pass, which takes a compiler, and minutes on a busy machine.
SGLANG_CPU_ENV = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", **ONE_THREAD}
VLLM_CPU_FLAGS = (
    "--max-model-len", "4096", "--max-num-seqs", "16", "--max-num-batched-tokens", "2048", "--enforce-eager",
)  # fmt: skip
VLLM_CPU_ENV = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", **ONE_THREAD,
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "2",
}  # fmt: skip


@dataclass(frozen=True)
class Configuration:
    """What a test needs started. `hooks` replaces the value of --forward-hooks; `drop` leaves out flags that take no value."""

    name: str
    model: Path
    engine: str = "sglang"
    layers: tuple[int, ...] | None = None
    via: Any = None
    flags: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    hooks: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] | None = None


@dataclass
class Running:
    """A started engine."""

    configuration: Configuration
    url: str
    dump_folder: Path
    make: Callable[[], EngineProcess]
    process: EngineProcess

    def parameters(self, kind: str | None = None, **changes: Any) -> EngineParameters:
        """Flow parameters that connect to it."""
        found: dict[str, Any] = {"kind": kind or self.configuration.engine, "url": self.url, "dump_folder": str(self.dump_folder)}
        if self.configuration.engine == "vllm" or kind == "sglang-unlabelled":
            found |= {"model": str(self.configuration.model), "layers": self.configuration.layers}
        return EngineParameters(**{**found, **changes})

    def get(self, path: str) -> requests.Response:
        """GET on the engine."""
        return requests.get(f"{self.url}{path}", timeout=60)

    def kill(self) -> None:
        """SIGKILL for the whole group, as an out-of-memory killer or a lost node would do."""
        os.killpg(self.process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while True:  # killed processes give their port back when the kernel has taken them down
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", urlsplit(self.url).port or 0)):
                    return
            assert time.monotonic() < deadline, "a killed engine still listens"
            time.sleep(0.02)

    def restart(self) -> None:
        """Starts the same command again."""
        self.process.stop()
        self.process = self.make()
        self.process.start()


class Engines:
    """At most one engine runs. Asking for another configuration stops the running one."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: Running | None = None
        self.starts: list[str] = []

    def running(self, configuration: Configuration) -> Running:
        """The engine of this configuration, started when it is not the running one."""
        if self._running is not None and self._running.configuration.name == configuration.name and self._running.process.alive():
            return self._running
        self.stop()
        dump_folder = RAM_DISK / f"dd-test-{secrets.token_hex(6)}"
        dump_folder.mkdir(mode=0o700)
        port = free_port()
        start = _vllm if configuration.engine == "vllm" else _sglang
        argv, env, ready = start(configuration, dump_folder, port)
        log = self._logs / f"{configuration.name}.log"
        make = partial(EngineProcess, argv, env=env, log=log, ready_url=ready, ready_timeout_seconds=READY_SECONDS)
        self._running = Running(configuration, f"http://127.0.0.1:{port}", dump_folder, make, make())
        self.starts.append(configuration.name)
        self._running.process.start()
        return self._running

    def stop(self) -> None:
        """Stops what runs and removes its dump folder."""
        if self._running is not None:
            self._running.process.stop(grace_seconds=0)  # SGLang waits five seconds before it ends on SIGTERM
            shutil.rmtree(self._running.dump_folder, ignore_errors=True)
            self._running = None


def sglang_environment() -> dict[str, str]:
    """What SGLang on the CPU needs in its environment, and where a flow finds it."""
    return {
        **SGLANG_CPU_ENV,
        "SGLANG_CPU_OMP_THREADS_BIND": "0",
        "PYTHONPATH": str(SHIM),
        PYTHON_VARIABLE: str(sglang_python()),
    }


def _sglang(configuration: Configuration, dump_folder: Path, port: int) -> tuple[list[str], dict[str, str], str]:
    command = sglang_command(
        configuration.model, dump_folder, layers=configuration.layers, via=configuration.via, port=port,
        python=str(sglang_python()), flags=(*SGLANG_CPU_FLAGS, *configuration.flags),
    )  # fmt: skip
    argv = [word for word in command.argv if word not in configuration.drop]
    if configuration.hooks is not None:
        place = argv.index("--forward-hooks") + 1
        argv[place] = json.dumps(configuration.hooks(json.loads(argv[place])))
    env = {**sglang_environment(), **configuration.env}
    env["PYTHONPATH"] = os.pathsep.join([str(SHIM), *command.search, str(HERE / "sglang_cpu")])
    return argv, env, f"http://127.0.0.1:{port}/ready"


def _vllm(configuration: Configuration, dump_folder: Path, port: int) -> tuple[list[str], dict[str, str], str]:
    command: LaunchCommand = vllm_command(
        configuration.model, dump_folder, layers=configuration.layers, port=port,
        program=_vllm_program(), connector="CpuHiddenStatesConnector", connector_module="cpu_connector",
        flags=(*VLLM_CPU_FLAGS, *configuration.flags),
    )  # fmt: skip
    env = {**VLLM_CPU_ENV, **configuration.env, "PYTHONPATH": str(HERE / "vllm_cpu")}
    return list(command.argv), env, f"http://127.0.0.1:{port}/health"


def _vllm_program() -> Sequence[str]:
    return (str(vllm_python()), "-m", "vllm.entrypoints.cli.main")
