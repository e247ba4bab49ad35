"""What the benchmarks run on: prompts of the field's lengths, a dataset, a checkpoint folder, engines, the disk's own rate."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_contracts.parameters import EngineParameters
from drafter_data.embedded.launch import SINGLE_THREADED, free_port
from drafter_data.engines.process import EngineProcess
from tests.support.datasets import write_dataset

RAM_DISK = Path("/dev/shm")
FIELD_MEAN_TOKENS = 2353.0
"""The field's campaign: 87.8 M tokens in 37,312 samples."""
FIELD_MOST_TOKENS = 8000


def field_lengths(
    count: int, *, mean_tokens: float = FIELD_MEAN_TOKENS, seed: int = 0, most_tokens: int = FIELD_MOST_TOKENS
) -> list[int]:
    """Log-normal lengths (sigma 0.8) scaled to the mean, distinct as the seed's way needs them, at least 16 and at most
    `most_tokens`, or as far beyond as distinct ones need.
    """
    lengths_n = np.random.default_rng(seed).lognormal(0.0, 0.8, count)
    lengths_n = np.clip(lengths_n / lengths_n.mean() * mean_tokens, 16, most_tokens).astype(int)
    taken: set[int] = set()
    for length in lengths_n.tolist():
        free = length
        while free in taken:
            free += 1
        taken.add(free)
    return [int(value) for value in np.random.default_rng(seed).permutation(sorted(taken))]


def prompts_of(lengths: Sequence[int], *, seed: int = 0, vocab_size: int = 1024) -> list[list[int]]:
    """Random prompts of these lengths."""
    draw = np.random.default_rng(seed)
    return [draw.integers(16, vocab_size, length).tolist() for length in lengths]


@contextmanager
def work_folder(parent: Path) -> Generator[Path]:
    """A folder for one benchmark, removed at its end."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="dd-bench-", dir=parent))
    folder.chmod(0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_dataset(folder: Path, prompts: Sequence[Sequence[int]]) -> Path:
    """A finished dataset of the prompts."""
    write_dataset(folder, prompts)
    return folder


def stub_checkpoint(folder: Path, *, hidden_size: int, num_layers: int, vocab_size: int = 1024) -> Path:
    """A folder with a configuration and weights without lm_head: the timed engine's log-probabilities come from no model, so that
    nothing could prove them; labelled dumps prove themselves.
    """
    folder.mkdir(parents=True)
    config = {"hidden_size": hidden_size, "num_hidden_layers": num_layers, "vocab_size": vocab_size, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({"stub": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}).encode()
    header += b" " * (-len(header) % 8)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    return folder


@dataclass(frozen=True)
class TimedEngine:
    """A running embedded engine in timed mode."""

    url: str
    dump_folder: Path
    model: Path

    def parameters(self, kind: str = "embedded") -> EngineParameters:
        """Flow parameters that name it."""
        return EngineParameters.model_validate(
            {"kind": kind, "url": self.url, "model": str(self.model), "dump_folder": str(self.dump_folder)}
        )


@contextmanager
def timed_engine(
    work: Path, dump_folder: Path, *, hidden_size: int = 4096, num_layers: int = 32, flags: Sequence[str] = ()
) -> Generator[TimedEngine]:
    """20 ms + 25 us a token a pass, at most 8,192 tokens a pass, unless `flags` say otherwise."""
    model = stub_checkpoint(work / f"model-{time.monotonic_ns()}", hidden_size=hidden_size, num_layers=num_layers)
    dump_folder.mkdir(mode=0o700, exist_ok=True)
    port = free_port()
    argv = [sys.executable, "-m", "drafter_data.embedded", "--timed", "--dump-folder", str(dump_folder), "--port", str(port)]
    argv += [
        "--model",
        str(model),
        "--hidden-size",
        str(hidden_size),
        "--num-layers",
        str(num_layers),
        "--skip-server-warmup",
        *flags,
    ]
    url = f"http://127.0.0.1:{port}"
    log = work / f"engine-{port}.log"
    with EngineProcess(argv, env=SINGLE_THREADED, log=log, ready_url=f"{url}/ready", ready_timeout_seconds=60):
        yield TimedEngine(url, dump_folder, model)


def copy_and_sync_rate(work: Path, *, file_bytes: int = 64 << 20, files: int = 4) -> float:
    """Bytes a second of `cp` from the RAM disk and `sync` of the copies: what the disk takes durably with ordinary tools."""
    with work_folder(RAM_DISK) as ram:
        sources = [ram / f"{number}" for number in range(files)]
        for source in sources:
            source.write_bytes(os.urandom(file_bytes))
        rate = file_bytes * files / copy_and_sync(sources, work / "rate")
        shutil.rmtree(work / "rate")
        return rate


def copy_and_sync(sources: Sequence[Path], target: Path) -> float:
    """Seconds of `cp` of the files into a new folder and `sync` of the copies and the folder."""
    target.mkdir()
    started = time.monotonic()
    subprocess.run(["cp", "--", *map(str, sources), str(target)], check=True)
    subprocess.run(["sync", *(str(target / source.name) for source in sources), str(target)], check=True)
    return time.monotonic() - started


def run_module(name: str, *arguments: str, timeout_seconds: float = 600) -> dict[str, object]:
    """Runs `python -m name` and returns the JSON document on its standard output. Raises RuntimeError with its last lines."""
    done = subprocess.run(
        [sys.executable, "-m", name, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        cwd=Path(__file__).parents[1],
    )
    if done.returncode:
        raise RuntimeError(f"{name} {' '.join(arguments)} ended with {done.returncode}: {done.stderr[-3000:]}")
    found: dict[str, object] = json.loads(done.stdout)
    return found


def tokens_of(prompts: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Lengths as an array."""
    return np.array([len(prompt) for prompt in prompts], dtype=np.int64)
