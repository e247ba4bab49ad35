"""Starting and watching a training job. Success is its exit status AND a complete fresh checkpoint that loads."""

from __future__ import annotations

import math
import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from data_contracts.handoff import Checkpoint, HandoffManifest, TrainingPoint
from drafter_data.errors import TrainingFailed
from drafter_data.trainers.base import Trainer
from drafter_data.trainers.curve import Curve
from drafter_data.trainers.job_process import JobProcess
from drafter_data.trainers.options import whole_number

JOB_LOG = "job.log"
"""The output of a hand-off's jobs, in its folder."""
POLL_SECONDS = 0.1
SILENCE_SECONDS = 1800
SLOWEST_READ_BYTES_PER_SECOND = 50e6
"""A trainer opens every file before its first line: a start is silent for as long as a slow disk takes to give them."""
_NOT_FOUND_STATUS = 127


def job_command(trainer: Trainer, manifest: HandoffManifest, options: Mapping[str, str]) -> list[str]:
    """The whole argument list: the trainer's, behind the option `submit` where it is set.

    A `submit` that ends in `--wrap` (sbatch) gets the command as one quoted argument, any other as further arguments.
    """
    command = trainer.command(manifest, options)
    submit = shlex.split(options.get("submit", ""))
    return [*submit, shlex.join(command)] if submit[-1:] == ["--wrap"] else [*submit, *command]


def silence_limit_seconds(manifest: HandoffManifest, options: Mapping[str, str]) -> float:
    """How long a job may say nothing: the option `silence_seconds`, or half an hour and the time to read all files slowly."""
    return float(whole_number(options, "silence_seconds") or SILENCE_SECONDS + manifest.bytes / SLOWEST_READ_BYTES_PER_SECOND)


def run_job(
    trainer: Trainer,
    manifest: HandoffManifest,
    options: Mapping[str, str],
    *,
    on_line: Callable[[str], None],
    on_point: Callable[[TrainingPoint], None],
    log: Path,
    command: Sequence[str] = (),
) -> Checkpoint:
    """Runs the job to its end, in its own process group, with its output at the end of `log`. `command`: instead of job_command's.

    Whatever ends this call early (a cancel, an exception of a callback, SIGKILL of this process) ends the whole group. Raises
    TrainingFailed with the log's tail: `never-started` (no such program, or not a line in the allowed time), `silent` (no further
    line in that time), `killed` (by a signal), `exit-status`, `nan-loss` (whatever the exit status; the job is ended at once), and
    what `trainer.finished` finds: `no-checkpoint`, `stale-checkpoint`, `bad-checkpoint`.
    """
    argv = list(command) or job_command(trainer, manifest, options)
    started_at, curve = time.time(), Curve()

    def keep(point: TrainingPoint) -> None:
        curve.take(point)
        on_point(point)

    job = JobProcess(argv, log)
    try:
        _watch(job, trainer, silence_limit_seconds(manifest, options), on_line, keep)
        _check_status(job.end())
        return trainer.finished(manifest, started_at).model_copy(update={"curve": tuple(curve.points())})
    except TrainingFailed as error:
        job.end()
        told = f"{error}\n  command: {shlex.join(argv)}\n  log {log} ends with:\n{job.tail()}"
        raise TrainingFailed(f"trainer {trainer.name}: {told}", reason=error.reason) from error
    finally:
        job.end()


def _watch(
    job: JobProcess,
    trainer: Trainer,
    silence_seconds: float,
    on_line: Callable[[str], None],
    on_point: Callable[[TrainingPoint], None],
) -> None:
    heard_at, heard = time.monotonic(), False
    while True:
        running = job.alive()  # asked before the read: what an ended job wrote last is still read
        lines = job.new_lines(last=not running)
        for line in lines:
            on_line(line)
            point = trainer.progress(line)
            if point is not None:
                on_point(point)
                if not math.isfinite(point.loss):
                    raise TrainingFailed(f"the loss of step {point.step} is {point.loss}", reason="nan-loss")
        if not running:
            return
        if lines:
            heard_at, heard = time.monotonic(), True
        elif time.monotonic() - heard_at > silence_seconds:
            reason = "silent" if heard else "never-started"
            raise TrainingFailed(f"the job has written nothing for {silence_seconds:.0f} s and was ended", reason=reason)
        else:
            time.sleep(POLL_SECONDS)


def _check_status(status: int) -> None:
    if status == _NOT_FOUND_STATUS:
        raise TrainingFailed("the command could not be started: no such program", reason="never-started")
    if status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        raise TrainingFailed(f"the job was killed by {name}", reason="killed")
    if status:
        raise TrainingFailed(f"the job ended with exit status {status}", reason="exit-status")
