"""Soak: an extraction with every transient fault at 2 %, while client and engine are killed at random; then every byte is compared.

    python -m tests.faults.soak --samples 20000 --minutes 10

The client is the flow `extract` under a real Prefect server, from the merge to the hand-off, or with `--bare` what its chunk tasks
run. `shifted-layer` is left out: a layer that is its neighbour once, in one request, is only seen by extracting that sample again,
or by validation. `exit` is what the kills do.
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
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from data_contracts.parameters import EngineParameters, ExtractionParameters, HandoffParameters, InputParameters, StorageParameters
from drafter_data.embedded.checkpoint import ensure_checkpoint
from drafter_data.embedded.faults import CONTENT_FAULTS, FILE_FAULTS
from drafter_data.embedded.launch import free_port
from drafter_data.errors import DrafterDataError
from drafter_data.extraction.campaign import run_campaign
from flows.local.services import Services
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


@dataclass(frozen=True)
class Scene:
    """What every run of the client is given."""

    folder: Path
    rows: Path
    """The dataset, or with Prefect the generation run."""
    engine: RunningEngine
    parameters: EngineParameters
    prefect: Mapping[str, str] | None
    """Environment in which the client is the flow; None: what its chunk tasks run."""
    every_seconds: float
    draw: random.Random

    def start(self, work: Path, limits: ExtractionParameters) -> subprocess.Popen[bytes]:
        """One run of the client, in a process of its own."""
        client = "--client" if self.prefect is None else "--flow"
        given = (self.rows, work, self.parameters.model_dump_json(), limits.model_dump_json())
        with (self.folder / "client.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.faults.soak", client, *map(str, given)],
                stdout=log,
                stderr=log,
                cwd=Path(__file__).parents[2],
                env={**os.environ, **(self.prefect or {})},
            )


def client(dataset: str, work: str, engine: str, limits: str) -> int:
    """One run of what chunk tasks run: 0 when all samples are stored."""
    extraction = ExtractionParameters.model_validate_json(limits)
    try:
        report = run_campaign(Path(dataset), Path(work) / "store", EngineParameters.model_validate_json(engine), extraction)
    except DrafterDataError as error:
        print(f"stopped: {error.reason}: {error}", flush=True)
        return 1
    print(f"{report.stored} stored, {report.failed} failed", flush=True)
    return int(report.failed > 0)


def flow(run: str, work: str, engine: str, limits: str) -> int:
    """One run of the flow: 0 when it has handed off all samples."""
    from flows.extract import extract  # imports Prefect, which the other client does without

    state = extract(
        input=InputParameters(runs=(run,)),
        engine=EngineParameters.model_validate_json(engine),
        extraction=ExtractionParameters.model_validate_json(limits),
        handoff=HandoffParameters(launch=False),
        storage=StorageParameters(folder=work, keep_free_gb=0),
        return_state=True,
    )
    return int(not state.is_completed())


def soak(
    folder: Path,
    *,
    samples: int,
    seconds: float,
    kill_every_seconds: float,
    seed: int,
    labelled: bool = True,
    prefect: Mapping[str, str] | None = None,
) -> Soak:
    """Rounds of extraction under fire until `seconds` have passed; the last round is ended, not cut."""
    rows = write_input(folder, random_prompts(samples, 8, 48, seed=seed), as_run=prefect is not None)
    script = folder / "faults.json"
    script.write_text('{"faults": []}')
    start = time.monotonic()
    with running_engine(
        ensure_checkpoint(folder / "model"), "--faults", str(script), *(() if labelled else UNLABELLED_FLAGS)
    ) as engine:
        parameters = engine.parameters(kind="embedded" if labelled else "sglang-unlabelled")
        scene = Scene(folder, rows, engine, parameters, prefect, kill_every_seconds, random.Random(seed))
        found = Soak(kill_at=start + _interval(scene))
        quiet = scene.start(folder / "quiet", LIMITS.model_copy(update={"dump_timeout_seconds": 20})).wait()
        assert quiet == 0, (folder / "client.log").read_text()[-3000:]
        script.write_text(json.dumps({"seed": seed, "faults": [{"name": name, "rate": RATE} for name in TRANSIENT]}))
        while not (found.rounds and found.client_kills + found.engine_kills) or time.monotonic() - start < seconds:
            work = folder / f"fire{found.rounds}"
            while not _one_run(found, scene, work):
                pass
            found.rounds += 1
            found.samples += samples
            _compare(found, folder / "quiet", work)
            found.seconds = time.monotonic() - start
            print(found.line(), flush=True)
    return found


def write_input(folder: Path, prompts: list[list[int]], *, as_run: bool) -> Path:
    """The prompts as a finished dataset, or as a generation run of tokenised rows."""
    if not as_run:
        return write_dataset(folder / "dataset", prompts).folder
    path = folder / "run.jsonl"
    path.write_text("".join(json.dumps({"input_ids": ids, "loss_mask": [0] + [1] * (len(ids) - 1)}) + "\n" for ids in prompts))
    return path


def _one_run(found: Soak, scene: Scene, work: Path) -> bool:
    """Runs the client until it ends or is killed; True when all samples are stored."""
    found.runs += 1
    process, engine = scene.start(work, LIMITS), scene.engine.process
    receipts = _receipt_bytes(work)
    if scene.every_seconds <= LONG_SECONDS:  # a short soak on a busy machine would kill nothing but clients that are just starting
        while process.poll() is None and _receipt_bytes(work) == receipts:
            time.sleep(0.02)
        found.kill_at = time.monotonic() + _interval(scene)
    while True:
        try:
            return process.wait(timeout=max(0.0, found.kill_at - time.monotonic())) == 0
        except subprocess.TimeoutExpired:
            found.kill_at = time.monotonic() + _interval(scene)
        if scene.draw.random() < 0.5:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            found.client_kills += 1
            return False
        os.killpg(engine.pid, signal.SIGKILL)
        engine.stop()
        engine.start()
        found.engine_kills += 1


def _interval(scene: Scene) -> float:
    return scene.draw.uniform(0.2, 1.8) * scene.every_seconds


def _receipt_bytes(work: Path) -> int:
    return sum(path.stat().st_size for path in work.glob("store/receipts/*.jsonl"))


def _compare(found: Soak, quiet: Path, work: Path) -> None:
    """Byte for byte, both ways."""
    expected = {path.name: path for path in quiet.glob("store/states/*/*.safetensors")}
    stored = {path.name: path for path in work.glob("store/states/*/*.safetensors")}
    found.different += sorted(expected.keys() ^ stored.keys())
    found.different += [
        name for name, path in stored.items() if name in expected and path.read_bytes() != expected[name].read_bytes()
    ]
    found.left += [str(path) for path in work.glob("store/states/*/.tmp-*")]


@contextmanager
def prefect_server(folder: Path) -> Generator[Mapping[str, str]]:
    """The environment of a Prefect server that runs for this long."""
    services = Services(folder, free_port())
    services.start(print)
    try:
        yield services.environment()
    finally:
        services.stop()


def main() -> int:
    if sys.argv[1:2] in (["--client"], ["--flow"]):
        return (client if sys.argv[1] == "--client" else flow)(*sys.argv[2:6])
    parser = argparse.ArgumentParser(description="Extraction under fire, compared byte for byte with a quiet run.")
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kill-every-seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unlabelled", action="store_true")
    parser.add_argument("--bare", action="store_true", help="without Prefect: what the chunk tasks run")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dd-soak-")))
        found = soak(
            folder,
            samples=options.samples,
            seconds=options.minutes * 60,
            kill_every_seconds=options.kill_every_seconds,
            seed=options.seed,
            labelled=not options.unlabelled,
            prefect=None if options.bare else stack.enter_context(prefect_server(folder / "prefect")),
        )
    return int(bool(found.different or found.left))


if __name__ == "__main__":
    sys.exit(main())
