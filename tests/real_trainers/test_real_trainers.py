"""speculators 0.9.0 and specforge 0.2.0 train from what the pipeline extracted, as it is, and see nothing that is spoilt."""

from __future__ import annotations

import subprocess
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file

from data_contracts.handoff import Checkpoint, HandoffManifest
from drafter_data.errors import TrainingFailed
from drafter_data.files import xxh3_of
from drafter_data.trainers.demo_train import table_of_outcomes, train_both
from drafter_data.trainers.handoff import hand_off
from drafter_data.trainers.job import run_job
from drafter_data.trainers.registry import trainer_named
from tests.real_trainers.conftest import SAMPLES, Damaged, Pipeline, command

pytestmark = [pytest.mark.real_trainer, pytest.mark.timeout(900)]

EVERY_JOB = {"device": "cpu", "max_error_rate": "1", "silence_seconds": "300", "env.OMP_NUM_THREADS": "1"}


def hand_off_damaged(damaged: Damaged, out: Path, name: str, options: dict[str, str]) -> HandoffManifest:
    """Hands the damaged store off and shows that each spoilt sample, and no other, is left out by its name and reason."""
    world = damaged.world
    manifest = hand_off(trainer_named(name), world.dataset, world.store, out, model=world.model, options=options)
    assert {each.sample_key for each in manifest.exclusions} == set(damaged.expected)
    assert all(each.reason in damaged.expected[each.sample_key] for each in manifest.exclusions), manifest.exclusions
    assert manifest.samples == SAMPLES - len(damaged.expected)
    assert manifest.trainer_version == {"speculators": "0.9.0", "specforge": "0.2.0"}[name]
    return manifest


def train(manifest: HandoffManifest, options: dict[str, str]) -> tuple[Checkpoint, list[float], str]:
    """The checkpoint, the loss of every step and the job's log."""
    log = Path(manifest.folder) / "job.log"
    losses: list[float] = []
    checkpoint = run_job(
        trainer_named(manifest.trainer),
        manifest,
        options,
        on_line=lambda _: None,
        on_point=lambda point: losses.append(point.loss),
        log=log,
    )
    assert np.isfinite(losses).all()
    assert checkpoint.digest == xxh3_of(Path(checkpoint.weights_file))
    return checkpoint, losses, log.read_text()


def loads(python: Path, script: str, *arguments: str) -> None:
    """Runs a script in the trainers' environment."""
    done = subprocess.run([python, "-c", script, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_speculators_trains_on_what_is_sound_and_its_loss_falls_by_a_third(
    damaged: Damaged, trainer_python: Path, tmp_path: Path
) -> None:
    options = {**EVERY_JOB, "python": str(trainer_python), "epochs": "6", "checkpoint_freq": "6", "lr": "5e-3"}
    options |= {"mask_token_id": "0", "total_seq_len": "512", "draft_vocab_size": "512"}
    manifest = hand_off_damaged(damaged, tmp_path / "out", "speculators", options)
    checkpoint, losses, log = train(manifest, options)
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
    assert "don't match" not in log and "don'tmatch" not in log, "a sample was skipped for its ids"


def test_specforge_trains_on_what_is_sound_and_its_loss_falls(damaged: Damaged, trainer_python: Path, tmp_path: Path) -> None:
    options = {**EVERY_JOB, "python": str(trainer_python), "draft_vocab_size": "512", "training.max_steps": "140"}
    options |= {"training.num_epochs": "2", "training.batch_size": "2", "training.learning_rate": "0.01"}
    # Without a GPU its loss runs in Triton's interpreter, row by row (tokens x ttt_length): nearly all of a step's time.
    options |= {"training.ttt_length": "1", "training.warmup_ratio": "0.0"}
    manifest = hand_off_damaged(damaged, tmp_path / "out", "specforge", options)
    checkpoint, losses, _ = train(manifest, options)
    first, last = float(np.mean(losses[:10])), float(np.mean(losses[-10:]))
    print(f"specforge: {len(losses)} steps, mean loss of the first 10 {first:.3f}, of the last 10 {last:.3f}: {last / first:.3f}")
    assert len(losses) >= 60
    assert last <= 0.9 * first, losses
    state = "import sys, torch; s = torch.load(sys.argv[1], weights_only=True); assert s"
    loads(trainer_python, state, checkpoint.weights_file)


def test_speculators_on_a_state_with_nan_fails_whatever_it_exits_with(
    damaged: Damaged, trainer_python: Path, tmp_path: Path
) -> None:
    options = {**EVERY_JOB, "python": str(trainer_python), "epochs": "1", "mask_token_id": "0", "total_seq_len": "512"}
    manifest = hand_off_damaged(damaged, tmp_path / "out", "speculators", options)
    for path in sorted((tmp_path / "out/states").iterdir()):  # spoilt after the hand-off, which would not have let it through
        tensors = load_file(path)
        tensors["hidden_states"][:, -1] = np.nan
        path.unlink()
        save_file(tensors, path)
    with pytest.raises(TrainingFailed) as caught:
        train(manifest, options)
    assert caught.value.reason == "nan-loss"


def test_demo_train_reports_both_trainers_side_by_side(pipeline: Pipeline, trainer_python: Path, tmp_path: Path) -> None:
    made = ["handoff", pipeline.dataset, pipeline.store, "--model", pipeline.model, "--out", tmp_path / "demo"]
    command(*made)
    few = {"epochs": "8", "checkpoint_freq": "8", "lr": "5e-3", "total_seq_len": "512", "env.OMP_NUM_THREADS": "1"}
    outcomes = train_both(tmp_path / "demo", tmp_path / "train", trainer_python, print, **few)
    assert [one.trainer for one in outcomes] == ["ridge", "speculators"]
    for one in outcomes:
        assert one.last_loss < one.first_loss
        assert one.agreement is not None
        assert 0 <= one.agreement < 1
        print(f"{one.trainer}: loss {one.first_loss:.3f} -> {one.last_loss:.3f}, held-out agreement {one.agreement:.3f}")
    assert outcomes[0].agreement, "ridge is fitted whole; so few epochs of the other promise a lower loss and no more"
    told = StringIO()
    Console(file=told, width=200).print(table_of_outcomes(outcomes))
    for one in outcomes:
        assert f"{one.first_loss:.4g}" in told.getvalue()
        assert f"{one.agreement:.1%}" in told.getvalue()
