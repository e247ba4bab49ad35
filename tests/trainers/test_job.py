"""Four ways for a job to fail, and that nothing of it outlives its end. Every job here is a real process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from data_contracts.handoff import Checkpoint, HandoffManifest, TrainingPoint
from drafter_data.errors import TrainingFailed
from drafter_data.report.training import read_curve
from drafter_data.trainers.curve import MOST_POINTS
from drafter_data.trainers.job import job_command, run_job, silence_limit_seconds
from drafter_data.trainers.limited_lines import BURST_LINES, LimitedLines
from drafter_data.trainers.ridge import RidgeTrainer
from tests.trainers.world import identity_of_model

STEP = "print('step=1/2 loss=0.5 agreement=0.1 baseline=0.0 seconds=1.0', flush=True)\n"
WRITE = (
    "import json, xxhash, numpy, pathlib\nfrom safetensors.numpy import save_file\n"
    "folder = pathlib.Path(FOLDER) / 'checkpoints/ridge'\nfolder.mkdir(parents=True, exist_ok=True)\n"
    "save_file({'fc.weight': numpy.full((2, 2), VALUE, numpy.float32)}, folder / 'drafter.safetensors')\n"
    "digest = xxhash.xxh3_128((folder / 'drafter.safetensors').read_bytes()).hexdigest()\n"
    "(folder / 'metrics.json').write_text(json.dumps({'weights_xxh3': digest, 'metrics': {}}))\n"
)


class ScriptTrainer(RidgeTrainer):
    """ridge, with a Python script of the test's for a job."""

    name = "script"

    def __init__(self, script: str) -> None:
        self.script = script

    def command(self, manifest: HandoffManifest, options: Mapping[str, str]) -> list[str]:
        return [options.get("program", sys.executable), "-c", self.script.replace("FOLDER", repr(manifest.folder))]


@pytest.fixture
def manifest(tmp_path: Path, model: Path) -> HandoffManifest:
    return HandoffManifest(
        trainer="script",
        folder=str(tmp_path),
        dataset="",
        dataset_id="",
        store="",
        identity=identity_of_model(model),
        model=str(model),
        samples=2,
        train_samples=1,
        validation_samples=1,
        tokens=2,
        supervised_tokens=2,
        bytes=5_000_000_000,
        longest_tokens=1,
        files_xxh3="",
    )


def run(script: str, manifest: HandoffManifest, **options: str) -> tuple[Checkpoint, list[str], list[TrainingPoint]]:
    lines: list[str] = []
    points: list[TrainingPoint] = []
    log = Path(manifest.folder) / "job.log"
    done = run_job(ScriptTrainer(script), manifest, options, on_line=lines.append, on_point=points.append, log=log)
    return done, lines, points


def failure(script: str, manifest: HandoffManifest, **options: str) -> TrainingFailed:
    with pytest.raises(TrainingFailed) as caught:
        run(script, manifest, **options)
    return caught.value


def test_job_with_status_zero_and_a_fresh_checkpoint_succeeds(manifest: HandoffManifest) -> None:
    checkpoint, lines, points = run(STEP + WRITE.replace("VALUE", "1.0") + "print('end', end='')", manifest)
    assert checkpoint.bytes == Path(checkpoint.weights_file).stat().st_size
    assert lines[0].startswith("step=1/2")
    assert lines[-1] == "end"
    assert [point.loss for point in points] == [0.5]


def test_job_that_prints_an_error_and_exits_zero_fails_for_want_of_a_checkpoint(manifest: HandoffManifest) -> None:
    error = failure(STEP + "print('ERROR: CUDA out of memory', flush=True)", manifest)
    assert error.reason == "no-checkpoint"
    assert "ERROR: CUDA out of memory" in str(error)
    assert "ERROR: CUDA out of memory" in (Path(manifest.folder) / "job.log").read_text()


def test_job_killed_by_sigkill_fails_with_the_signal_named(manifest: HandoffManifest) -> None:
    error = failure(STEP + WRITE.replace("VALUE", "1.0") + "import os; os.kill(os.getpid(), 9)", manifest)
    assert error.reason == "killed"
    assert "SIGKILL" in str(error)
    assert "step=1/2" in str(error)


def test_job_with_a_nan_loss_fails_whatever_it_exits_with(manifest: HandoffManifest) -> None:
    nan = STEP.replace("loss=0.5", "loss=nan")
    error = failure(STEP + nan + WRITE.replace("VALUE", "1.0") + "import time; time.sleep(60)", manifest)
    assert error.reason == "nan-loss"
    assert "loss=nan" in str(error), "the log's tail"


def test_job_whose_weights_are_nan_fails_although_its_lines_are_fine(manifest: HandoffManifest) -> None:
    assert failure(STEP + WRITE.replace("VALUE", "float('nan')"), manifest).reason == "nan-loss"


def test_job_that_does_not_exist_never_started(manifest: HandoffManifest) -> None:
    error = failure("", manifest, program="/nonexistent/torchrun")
    assert error.reason == "never-started"
    assert "/nonexistent/torchrun" in str(error)


def test_job_that_says_nothing_never_started_and_is_ended(manifest: HandoffManifest) -> None:
    started = time.monotonic()
    assert failure("import time; time.sleep(60)", manifest, silence_seconds="1").reason == "never-started"
    assert time.monotonic() - started < 20


def test_job_that_falls_silent_is_ended(manifest: HandoffManifest) -> None:
    assert failure(STEP + "import time; time.sleep(60)", manifest, silence_seconds="6").reason == "silent"


def test_job_with_an_exit_status_fails_with_the_log_tail(manifest: HandoffManifest) -> None:
    error = failure(STEP + WRITE.replace("VALUE", "1.0") + "raise SystemExit('no such device')", manifest)
    assert error.reason == "exit-status"
    assert "exit status 1" in str(error)
    assert "no such device" in str(error)


def test_job_that_leaves_an_earlier_checkpoint_fails_as_stale(manifest: HandoffManifest) -> None:
    run(STEP + WRITE.replace("VALUE", "1.0"), manifest)
    assert failure(STEP, manifest).reason == "stale-checkpoint"


def test_job_with_a_cut_checkpoint_fails(manifest: HandoffManifest) -> None:
    cut = "import os; os.truncate(folder / 'drafter.safetensors', 70)"
    assert failure(STEP + WRITE.replace("VALUE", "1.0") + cut, manifest).reason == "bad-checkpoint"


def test_curve_of_a_long_job_is_thinned_to_its_bound_and_keeps_both_ends(manifest: HandoffManifest) -> None:
    many = "for n in range(1, 5001): print(f'step={n}/5000 loss={1 / n} agreement=0.1 baseline=0.0 seconds=1.0')\n"
    checkpoint, _, points = run(many + WRITE.replace("VALUE", "1.0"), manifest)
    assert [point.step for point in points] == list(range(1, 5001))
    steps = [point.step for point in checkpoint.curve]
    assert steps[0] == 1
    assert steps[-1] == 5000
    assert 400 < len(steps) <= MOST_POINTS + 1
    assert len(set(np.diff(steps[:-1]).tolist())) == 1, "evenly thinned"
    assert read_curve(manifest.model_copy(update={"trainer": "ridge"})) == list(checkpoint.curve)


def test_lines_for_the_log_come_at_a_bounded_rate_and_say_what_was_left_out() -> None:
    now, said = [0.0], list[str]()
    lines = LimitedLines(said.append, lambda: now[0])
    for n in range(500):
        lines.take(f"line {n}")
        lines.take("  ")
    assert said == [f"line {n}" for n in range(BURST_LINES)]
    now[0] = 1.0
    lines.take("later")
    lines.end()
    assert said[BURST_LINES:] == ["… 400 more lines in the job's own log …", "later"]


def test_silence_allowed_grows_with_the_bytes_to_read(manifest: HandoffManifest) -> None:
    assert silence_limit_seconds(manifest, {}) == 1800 + 100


def test_submitted_command_is_wrapped_as_the_scheduler_wants_it(manifest: HandoffManifest) -> None:
    trainer = ScriptTrainer("print('a b')")
    plain = trainer.command(manifest, {})
    assert job_command(trainer, manifest, {"submit": "srun -N 2"}) == ["srun", "-N", "2", *plain]
    wrapped = job_command(trainer, manifest, {"submit": "sbatch --wait --wrap"})
    assert wrapped[:3] == ["sbatch", "--wait", "--wrap"]
    assert len(wrapped) == 4


GROUP = (
    "import subprocess, sys, os, time, pathlib\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(120)'])\n"
    "pathlib.Path(FOLDER, 'pids').write_text(f'{os.getpid()} {child.pid}')\n"
    "print('up', flush=True)\ntime.sleep(120)\n"
)


def wait_until_gone(pids: list[int], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if is_running(pid)]}"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_exception_of_a_callback_ends_the_whole_group(manifest: HandoffManifest) -> None:
    def cancel(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(ScriptTrainer(GROUP), manifest, {}, on_line=cancel, on_point=print, log=Path(manifest.folder) / "job.log")
    wait_until_gone([int(pid) for pid in (Path(manifest.folder) / "pids").read_text().split()])


def test_sigkill_of_the_watcher_ends_the_whole_group(manifest: HandoffManifest, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(manifest.model_dump_json())
    watcher = (
        "import sys; from pathlib import Path\n"
        "from tests.trainers.test_job import *\n"
        f"run(GROUP, HandoffManifest.model_validate_json(Path({str(tmp_path / 'manifest.json')!r}).read_bytes()))\n"
    )
    root = Path(__file__).parent.parent.parent
    process = subprocess.Popen([sys.executable, "-c", watcher], cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
    deadline = time.monotonic() + 60
    while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
        assert process.poll() is None, "the watcher ended early"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until_gone(pids)
