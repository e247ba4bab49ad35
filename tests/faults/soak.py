"""Soak: an extraction with every transient fault at 2 %, while client and engine are killed at random; then every byte is compared.

    python -m tests.faults.soak --samples 20000 --minutes 10

The client is what a flow's chunk tasks run, in a process of its own; a kill of a whole flow under a real Prefect is in
tests/flows/test_resuming.py. `shifted-layer` is left out: a layer that is its neighbour once, in one request, is only seen by
extracting that sample again, or by validation. `exit` is what the kills do.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from data_contracts.parameters import EngineParameters, ExtractionParameters
from drafter_data.embedded.checkpoint import ensure_checkpoint
from drafter_data.embedded.faults import CONTENT_FAULTS, FILE_FAULTS
from drafter_data.errors import DrafterDataError
from drafter_data.extraction.campaign import run_campaign
from tests.faults.cells import UNLABELLED_FLAGS
from tests.support.datasets import random_prompts, write_dataset
from tests.support.engines import RunningEngine, running_engine

TRANSIENT = [
    name for name in (*CONTENT_FAULTS, *FILE_FAULTS, "silent", "server-error", "cut-prompt", "foreign") if name != "shifted-layer"
]
RATE = 0.02
LONG_SECONDS = 10.0
"""Kills that are further apart come whenever they come; closer ones wait for a run's first receipt."""
LIMITS = ExtractionParameters(
    in_flight=16, attempts=10, dump_timeout_seconds=0.5, request_timeout_seconds=2, stop_after_failures=200, recheck_samples=1
)


@dataclass
class Soak:
    """What a soak counted."""

    seconds: float = 0.0
    rounds: int = 0
    runs: int = 0
    client_kills: int = 0
    engine_kills: int = 0
    samples: int = 0
    kill_at: float = 0.0
    different: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def line(self) -> str:
        return (
            f"{self.samples} samples in {self.rounds} rounds, {self.seconds:.0f} s, {len(TRANSIENT)} faults at {RATE:.0%} each, "
            f"{self.client_kills} kills of the client, {self.engine_kills} of the engine, {self.runs} runs: "
            f"{len(self.different)} files differ from the quiet run's, {len(self.left)} temporary files left"
        )


def child(dataset: str, store: str, engine: str) -> int:
    """One run of the client, in a process of its own: 0 when all samples are stored."""
    try:
        report = run_campaign(Path(dataset), Path(store), EngineParameters.model_validate_json(engine), LIMITS)
    except DrafterDataError as error:
        print(f"stopped: {error.reason}: {error}", flush=True)
        return 1
    print(f"{report.stored} stored, {report.failed} failed", flush=True)
    return int(report.failed > 0)


def soak(folder: Path, *, samples: int, seconds: float, kill_every_seconds: float, seed: int, labelled: bool = True) -> Soak:
    """Rounds of extraction under fire until `seconds` have passed; the last round is ended, not cut."""
    dataset = write_dataset(folder / "dataset", random_prompts(samples, 8, 48, seed=seed))
    model = ensure_checkpoint(folder / "model")
    script = folder / "faults.json"
    script.write_text('{"faults": []}')
    draw, start = random.Random(seed), time.monotonic()
    found = Soak(kill_at=start + _interval(draw, kill_every_seconds))
    with running_engine(model, "--faults", str(script), *(() if labelled else UNLABELLED_FLAGS)) as engine:
        parameters = engine.parameters(kind="embedded" if labelled else "sglang-unlabelled")
        report = run_campaign(dataset.folder, folder / "quiet", parameters, LIMITS.model_copy(update={"dump_timeout_seconds": 20}))
        assert report.failed == 0
        script.write_text(json.dumps({"seed": seed, "faults": [{"name": name, "rate": RATE} for name in TRANSIENT]}))
        while not (found.rounds and found.client_kills + found.engine_kills) or time.monotonic() - start < seconds:
            store = folder / f"fire{found.rounds}"
            while not _one_run(found, engine, parameters, dataset.folder, store, draw, kill_every_seconds, folder / "child.log"):
                pass
            found.rounds += 1
            found.samples += samples
            _compare(found, folder / "quiet", store)
            found.seconds = time.monotonic() - start
            print(found.line(), flush=True)
    return found


def _one_run(
    found: Soak,
    engine: RunningEngine,
    parameters: EngineParameters,
    dataset: Path,
    store: Path,
    draw: random.Random,
    every: float,
    log: Path,
) -> bool:
    """Runs the client until it ends or is killed; True when all samples are stored."""
    found.runs += 1
    command = [sys.executable, "-m", "tests.faults.soak", "--child", str(dataset), str(store), parameters.model_dump_json()]
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=Path(__file__).parents[2])
    receipts = _receipt_bytes(store)
    if every <= LONG_SECONDS:  # a short soak on a busy machine would kill nothing but clients that are just starting
        while process.poll() is None and _receipt_bytes(store) == receipts:
            time.sleep(0.02)
        found.kill_at = time.monotonic() + _interval(draw, every)
    while True:
        try:
            return process.wait(timeout=max(0.0, found.kill_at - time.monotonic())) == 0
        except subprocess.TimeoutExpired:
            found.kill_at = time.monotonic() + _interval(draw, every)
        if draw.random() < 0.5:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            found.client_kills += 1
            return False
        os.killpg(engine.process.pid, signal.SIGKILL)
        engine.process.stop()
        engine.process.start()
        found.engine_kills += 1


def _interval(draw: random.Random, every: float) -> float:
    return draw.uniform(0.2, 1.8) * every


def _receipt_bytes(store: Path) -> int:
    return sum(path.stat().st_size for path in store.glob("receipts/*.jsonl"))


def _compare(found: Soak, quiet: Path, store: Path) -> None:
    """Byte for byte, both ways."""
    expected = {path.name: path for path in quiet.glob("states/*/*.safetensors")}
    stored = {path.name: path for path in store.glob("states/*/*.safetensors")}
    found.different += sorted(expected.keys() ^ stored.keys())
    found.different += [
        name for name, path in stored.items() if name in expected and path.read_bytes() != expected[name].read_bytes()
    ]
    found.left += [str(path) for path in store.glob("states/*/.tmp-*")]


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        return child(*sys.argv[2:5])
    parser = argparse.ArgumentParser(description="Extraction under fire, compared byte for byte with a quiet run.")
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kill-every-seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unlabelled", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dd-soak-") as folder:
        found = soak(
            Path(folder),
            samples=options.samples,
            seconds=options.minutes * 60,
            kill_every_seconds=options.kill_every_seconds,
            seed=options.seed,
            labelled=not options.unlabelled,
        )
    return int(bool(found.different or found.left))


if __name__ == "__main__":
    sys.exit(main())
