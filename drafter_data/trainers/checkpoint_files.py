"""Whether a training job left a complete, fresh checkpoint that loads."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data_contracts.handoff import Checkpoint
from drafter_data.errors import TrainingFailed
from drafter_data.files import xxh3_of
from drafter_data.safetensors_file import MalformedFile, TensorFile, as_float32

_FLOATS = ("F32", "F16", "BF16", "F64")


def fresh_checkpoint(folder: Path, weights: Path, required: tuple[str, ...], started_at: float) -> Checkpoint:
    """The checkpoint in `folder`, after checks.

    Raises TrainingFailed: `no-checkpoint` (a required file or the weights are missing), `stale-checkpoint` (older than the job),
    `bad-checkpoint` (weights that do not load), `nan-loss` (weights that hold a NaN or infinite value).
    """
    missing = [name for name in (weights.name, *required) if not (folder / name).is_file()]
    if missing:
        raise TrainingFailed(f"no complete checkpoint in {folder}: {', '.join(missing)} missing", reason="no-checkpoint")
    for name in (weights.name, *required):
        written = (folder / name).stat().st_mtime
        if written < started_at:
            raise TrainingFailed(
                f"{folder / name} is {started_at - written:.0f} s older than the job: an earlier job's checkpoint",
                reason="stale-checkpoint",
            )
    _check_weights(weights)
    return Checkpoint(
        folder=str(folder), weights_file=str(weights), bytes=weights.stat().st_size, digest=xxh3_of(weights), metrics={}
    )


def _check_weights(weights: Path) -> None:
    try:
        with TensorFile.open(weights) as file:
            if not file.tensors:
                raise TrainingFailed(f"{weights} holds no tensor", reason="bad-checkpoint")
            for name, entry in file.tensors.items():
                if entry.dtype in _FLOATS and not np.isfinite(as_float32(file.array(name), entry.dtype)).all():
                    raise TrainingFailed(f"{weights}: tensor {name} holds a NaN or infinite value", reason="nan-loss")
    except MalformedFile as error:
        raise TrainingFailed(f"the checkpoint does not load: {error}", reason="bad-checkpoint") from error
