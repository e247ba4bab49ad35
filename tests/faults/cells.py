"""One cell of the fault matrix: an extraction while a fault is on, compared with the bytes of a quiet one."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_contracts.extraction import GateReport
from data_contracts.parameters import EngineParameters, ExtractionParameters
from data_contracts.preflight import PreflightReport
from drafter_data.dataset import Dataset
from drafter_data.embedded.faults import drawn, prompt_key
from drafter_data.errors import DrafterDataError
from drafter_data.extraction.campaign import check_engine, extract_all, pending_chunks, plan_over
from drafter_data.extraction.session import SessionSettings, shared_session
from drafter_data.gate import judge
from drafter_data.store.store import Store
from tests.support.engines import RunningEngine, running_engine

UNLABELLED_FLAGS = ("--dumps", "unlabelled", "--prefill-max-requests", "1", "--chunked-prefill-size", "-1")
RIGHT = "all right"


@dataclass(frozen=True)
class Setting:
    """A column of the matrix."""

    labelled: bool
    in_flight: int

    @property
    def title(self) -> str:
        return f"{'labelled' if self.labelled else 'unlabelled'}, {self.in_flight} in flight"


@dataclass
class Bench:
    """A running engine with a fault script, and what a quiet run of it stored."""

    setting: Setting
    engine: RunningEngine
    script: Path
    dataset: Dataset
    folder: Path
    checked: PreflightReport | None = None
    quiet: dict[str, str] = field(default_factory=dict)
    wrong: int = 0
    unexplained: int = 0
    committed: int = 0
    runs: int = 0

    def set_faults(self, *faults: dict[str, Any], seed: int = 0) -> None:
        """Gives the running engine another script."""
        temporary = self.script.with_suffix(".new")
        temporary.write_text(json.dumps({"seed": seed, "faults": faults}))
        time.sleep(0.002)  # the engine tells scripts apart by their time
        temporary.replace(self.script)

    @property
    def parameters(self) -> EngineParameters:
        return self.engine.parameters(kind="embedded" if self.setting.labelled else "sglang-unlabelled")

    def extraction(self, **changes: Any) -> ExtractionParameters:
        """Short waits: the engine is this machine's."""
        values = {"in_flight": self.setting.in_flight, "attempts": 2, "recheck_samples": 0, "dump_timeout_seconds": 0.8}
        return ExtractionParameters(**{**values, "request_timeout_seconds": 2, "stop_after_failures": 1000, **changes})

    def preflight(self, store: Path, **changes: Any) -> PreflightReport:
        """A preflight of its own."""
        return check_engine(self.dataset, store, self.parameters, self.extraction(**changes), keep_free_bytes=0)

    def extract(self, store: Path, *, engine_wait_seconds: float = 20.0, keep_free_bytes: int = 0, **changes: Any) -> GateReport:
        """An extraction behind the quiet preflight. Raises what stopped it."""
        extraction = self.extraction(**changes)
        checked = self.checked = self.checked or self.preflight(self.folder / "preflight")
        plan = plan_over(self.dataset, store, extraction, checked)
        settings = SessionSettings(
            dataset=self.dataset.folder,
            store=store,
            engine=self.parameters,
            extraction=extraction,
            in_flight=checked.in_flight,
            tolerance=checked.canary.tolerance,
            engine_wait_seconds=engine_wait_seconds,
            keep_free_bytes=keep_free_bytes,
        )
        with shared_session(settings) as session:
            extract_all(session, pending_chunks(plan, session.store))
        opened = Store.open(store)
        try:
            return judge(plan, opened, max_error_rate=0.0)
        finally:
            opened.close()

    @contextmanager
    def meanwhile(self, work: Callable[[], None]) -> Generator[None]:
        """Something else that happens beside an extraction."""
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        yield
        thread.join(30)
        assert not thread.is_alive()

    def new_store(self) -> Path:
        self.runs += 1
        return self.folder / f"store{self.runs}"

    def outcome(self, run: Callable[[Path], GateReport]) -> str:
        """Runs into a new store, compares every committed state with the quiet run's bytes, and says how it ended."""
        store = self.new_store()
        try:
            report = run(store)
        except DrafterDataError as error:
            self.compare(store)
            return f"stopped: {error.reason}"
        self.compare(store)
        reasons = sorted({failure.reason for chunk in report.failed_chunks for failure in chunk.failures})
        self.unexplained += report.planned - report.stored - report.failed
        self.unexplained += sum(not failure.reason for chunk in report.failed_chunks for failure in chunk.failures)
        return f"failed: {', '.join(reasons)}" if reasons else RIGHT

    def compare(self, store: Path) -> None:
        """Counts states that differ from the quiet run's, be they receipted or only lying there."""
        for path in store.glob("states/*/*.safetensors"):
            self.committed += 1
            self.wrong += digest(path) != self.quiet[path.stem]


def digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes()).hexdigest()


@contextmanager
def bench(setting: Setting, model: Path, dataset: Dataset, folder: Path, *flags: str) -> Generator[Bench]:
    """A bench whose quiet run is done."""
    folder.mkdir()
    script = folder / "faults.json"
    script.write_text('{"faults": []}')
    kind_flags = () if setting.labelled else UNLABELLED_FLAGS
    with running_engine(model, "--faults", str(script), *kind_flags, *flags) as engine:
        made = Bench(setting, engine, script, dataset, folder)
        quiet = made.new_store()
        report = made.extract(quiet)
        assert (report.failed, report.stored) == (0, report.planned)
        made.quiet = {path.stem: digest(path) for path in quiet.glob("states/*/*.safetensors")}
        assert len(made.quiet) == report.planned
        yield made


@contextmanager
def restarted_when_gone(bench: Bench) -> Generator[None]:
    """Somebody who starts the engine again, without faults, when it has exited."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.05):
            if not bench.engine.process.alive():
                bench.engine.process.stop()
                bench.set_faults()
                bench.engine.process.start()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def hit(name: str, *, sticky: float = 0.25, transient: float = 0.3, **more: Any) -> Sequence[dict[str, Any]]:
    """Some prompts are hit at their first attempt alone, others always."""
    faults = [{"name": name, "rate": transient, "per_prompt": True, "attempts": 1, **more}] if transient else []
    return [*faults, *([{"name": name, "rate": sticky, "per_prompt": True, **more}] if sticky else [])]


def seed_of_one_each(dataset: Dataset, rate: float) -> int:
    """A seed for `hit` by which one prompt is hit at its first attempt alone, and another one always."""
    keys = [prompt_key(sample.input_ids_s.astype(np.int64)) for sample in dataset.samples()]
    for seed in range(10_000):
        once, always = ({key for key in keys if drawn(seed, number, 0, key) < rate} for number in (0, 1))
        if len(once) == len(always) == 1 and once != always:
            return seed
    raise AssertionError("no such seed")


def resumes(bench: Bench, store: Path) -> None:
    """After the fault is gone, a further run completes the store."""
    bench.set_faults()
    report = bench.extract(store)
    assert (report.failed, report.stored) == (0, report.planned)
    bench.compare(store)


def leave_overs(bench: Bench) -> list[Path]:
    """What a killed run and a foreign program left in the dump folder, with the names and lengths of ours."""
    folder, left = bench.engine.dump_folder, list[Path]()
    foreign = folder / "somebody-elses.bin"
    foreign.write_bytes(b"x")
    left.append(foreign)
    if not bench.setting.labelled:
        for number, length in enumerate({len(sample.input_ids_s) for sample in bench.dataset.samples()}):
            old = folder / f"req_{90000 + number:08d}"
            old.mkdir(mode=0o700)
            for name in (*(f"layer_{layer}.safetensors" for layer in (2, 4, 5, 8)), "meta.json"):
                size = length * 64 * 4
                header = json.dumps({"hidden_states": {"dtype": "F32", "shape": [length, 64], "data_offsets": [0, size]}}).encode()
                meta = json.dumps({"num_tokens": length, "final_norm": "pre"}).encode()
                old.joinpath(name).write_bytes(
                    meta if name == "meta.json" else len(header).to_bytes(8, "little") + header + os.urandom(size)
                )
            left.append(old)
    return left
