"""speculators 0.9.0 and specforge 0.2.0 train from what the pipeline extracted, as it is."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from data_contracts.handoff import Checkpoint, HandoffManifest, TrainingPoint
from drafter_data.dataset import Dataset
from drafter_data.errors import TrainingFailed
from drafter_data.store.store import Store
from drafter_data.trainers.handoff import hand_off
from drafter_data.trainers.job import run_job
from drafter_data.trainers.registry import trainer_named
from tests.real_trainers.conftest import Pipeline

pytestmark = [pytest.mark.real_trainer, pytest.mark.timeout(1500)]


def train(pipeline: Pipeline, out: Path, name: str, options: dict[str, str]) -> tuple[HandoffManifest, Checkpoint, list[float]]:
    trainer = trainer_named(name)
    dataset, store = Dataset.open(pipeline.dataset), Store.open(pipeline.store)
    manifest = hand_off(trainer, dataset, store, out, model=pipeline.model, options=options)
    points: list[TrainingPoint] = []
    log = out / "job.log"
    checkpoint = run_job(trainer, manifest, options, on_line=lambda _: None, on_point=points.append, log=log)
    return manifest, checkpoint, [point.loss for point in points]


def loads(python: Path, script: str, *arguments: str) -> None:
    done = subprocess.run([python, "-c", script, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_speculators_trains_and_its_loss_falls_by_a_third(pipeline: Pipeline, trainer_python: Path, tmp_path: Path) -> None:
    options = {"device": "cpu", "python": str(trainer_python), "epochs": "10", "checkpoint_freq": "10", "lr": "5e-3"}
    options |= {"mask_token_id": "0", "total_seq_len": "512", "draft_vocab_size": "512"}
    manifest, checkpoint, losses = train(pipeline, tmp_path / "out", "speculators", options)
    first, last = float(np.mean(losses[:3])), float(np.mean(losses[-3:]))
    print(
        f"speculators: {manifest.train_samples} samples, {len(losses)} steps, loss {first:.3f} -> {last:.3f}, {checkpoint.metrics}"
    )
    assert last <= first * 2 / 3
    assert 0 <= checkpoint.metrics["held_out_agreement"] <= 1
    loads(
        trainer_python,
        "import sys; from speculators.model import SpeculatorModel; SpeculatorModel.from_pretrained(sys.argv[1])",
        checkpoint.folder,
    )
    log = (tmp_path / "out/job.log").read_text()
    assert "don't match" not in log and "don'tmatch" not in log, "a sample was skipped for its ids"


def test_specforge_trains_and_its_loss_falls(pipeline: Pipeline, trainer_python: Path, tmp_path: Path) -> None:
    options = {"device": "cpu", "python": str(trainer_python), "draft_vocab_size": "512", "training.max_steps": "60"}
    options |= {"training.num_epochs": "1", "training.batch_size": "2", "training.learning_rate": "0.003"}
    options |= {"training.ttt_length": "3", "training.warmup_ratio": "0.0"}
    _, checkpoint, losses = train(pipeline, tmp_path / "out", "specforge", options)
    first, last = float(np.mean(losses[:10])), float(np.mean(losses[-10:]))
    print(f"specforge: {len(losses)} steps, mean loss of the first 10 {first:.3f}, of the last 10 {last:.3f}")
    assert len(losses) >= 60
    assert last <= 0.9 * first
    state = "import sys, torch; s = torch.load(sys.argv[1], weights_only=True); assert s"
    loads(trainer_python, state, checkpoint.weights_file)


def test_speculators_on_a_state_with_nan_fails_whatever_it_exits_with(
    pipeline: Pipeline, trainer_python: Path, tmp_path: Path
) -> None:
    options = {"device": "cpu", "python": str(trainer_python), "epochs": "1", "mask_token_id": "0", "total_seq_len": "512"}
    trainer, out = trainer_named("speculators"), tmp_path / "out"
    manifest = hand_off(
        trainer, Dataset.open(pipeline.dataset), Store.open(pipeline.store), out, model=pipeline.model, options=options
    )
    for path in sorted((out / "states").iterdir()):  # spoilt after the hand-off, which would not have let it through
        tensors = load_file(path)
        tensors["hidden_states"][:, -1] = np.nan
        path.unlink()
        save_file(tensors, path)
    with pytest.raises(TrainingFailed) as caught:
        run_job(trainer, manifest, options, on_line=lambda _: None, on_point=lambda _: None, log=out / "job.log")
    assert caught.value.reason == "nan-loss"
