"""A checkpoint made once, and embedded engines as real processes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests

from data_contracts.dump import rid_prefix_of
from drafter_data.embedded.checkpoint import ensure_checkpoint
from drafter_data.embedded.launch import SINGLE_THREADED, embedded_command, free_port
from drafter_data.embedded.llama import Llama
from drafter_data.engines.process import EngineProcess
from drafter_data.safetensors_file import TensorFile

LAYERS = (2, 4, 5, 8)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> Llama:
    return Llama.load(checkpoint)


@dataclass
class RunningEngine:
    """A served engine, its dump folder and its request log."""

    url: str
    dumps: Path
    request_log: Path
    process: EngineProcess
    local: threading.local = field(default_factory=threading.local)

    def post(self, payload: Any, path: str = "/generate", **options: Any) -> requests.Response:
        session = getattr(self.local, "session", None)
        if session is None:
            session = self.local.session = requests.Session()
        return session.post(self.url + path, json=payload, timeout=60, **options)

    def generate(self, ids: Sequence[int], rid: str = "dd-1", new_tokens: int = 1, **fields: Any) -> dict[str, Any]:
        sampling = {"max_new_tokens": new_tokens, "temperature": 0}
        reply = self.post({"input_ids": list(ids), "rid": rid, "sampling_params": sampling, **fields})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, timeout=60)

    def labelled(self, rid: str) -> list[TensorFile]:
        return [TensorFile.open(path) for path in sorted(self.dumps.glob(rid_prefix_of(rid) + "*"))]

    def states(self, rid: str) -> np.ndarray:
        return np.concatenate([file.array("hidden_states") for file in self.labelled(rid)])

    def passes(self) -> list[tuple[str, int]]:
        """(folder name, tokens) of each unlabelled dump, in order."""
        return [(p.parent.name, json.loads(p.read_text())["num_tokens"]) for p in sorted(self.dumps.glob("req_*/meta.json"))]

    def logged(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.request_log.read_text().splitlines()]


@pytest.fixture
def start_engine(tmp_path: Path, checkpoint: Path) -> Iterator[Callable[..., RunningEngine]]:
    """Starts embedded engines with the flags given; all are ended with the test."""
    with ExitStack() as stack:

        def start(*flags: str, model: Path = checkpoint) -> RunningEngine:
            number = len(list(tmp_path.glob("dumps*")))
            dumps, log = tmp_path / f"dumps{number}", tmp_path / f"requests{number}.jsonl"
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            command = embedded_command(model=model, dump_folder=dumps, port=port, flags=["--request-log", str(log), *flags])
            process = EngineProcess(
                command, env=SINGLE_THREADED, log=tmp_path / "engine.log", ready_url=url + "/ready", ready_timeout_seconds=60
            )
            stack.enter_context(process)
            return RunningEngine(url, dumps, log, process)

        yield start
