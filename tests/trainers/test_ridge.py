"""The ridge trainer learns, agrees with an independent fit, and notices shuffled states."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from data_contracts.handoff import Checkpoint, HandoffManifest, TrainingPoint
from drafter_data.checkpoints import Checkpoint as Model
from drafter_data.trainers.handoff import hand_off
from drafter_data.trainers.job import run_job
from drafter_data.trainers.registry import trainer_named
from drafter_data.trainers.ridge_job import RidgeJob
from tests.trainers.world import Row, World, make_world


def hand_off_to_ridge(world: World, out: Path) -> HandoffManifest:
    return hand_off(trainer_named("ridge"), world.dataset, world.store, out, model=world.model, options={"validation_share": "0.2"})


def run_ridge(manifest: HandoffManifest) -> tuple[Checkpoint, list[TrainingPoint], list[str]]:
    points: list[TrainingPoint] = []
    lines: list[str] = []
    log = Path(manifest.folder) / "job.log"
    checkpoint = run_job(trainer_named("ridge"), manifest, {}, on_line=lines.append, on_point=points.append, log=log)
    return checkpoint, points, lines


def test_ridge_job_learns_and_leaves_a_checkpoint_that_loads(shared_world: World, tmp_path: Path) -> None:
    manifest = hand_off_to_ridge(shared_world, tmp_path / "out")
    checkpoint, points, lines = run_ridge(manifest)
    assert points[-1].step == manifest.train_samples
    assert points[-1].loss < 0.7 * points[0].loss
    assert checkpoint.metrics["held_out_agreement"] > 5 * checkpoint.metrics["baseline_agreement"]
    assert load_file(checkpoint.weights_file)["fc.weight"].shape == (64, 256)
    assert lines[-1].startswith("done ")
    assert json.loads((tmp_path / "out/checkpoints/ridge/metrics.json").read_text())["weights_xxh3"] == checkpoint.digest


def test_ridge_weights_equal_an_independent_least_squares_fit(world: World, tmp_path: Path) -> None:
    manifest = hand_off_to_ridge(world, tmp_path / "out")
    job = RidgeJob(tmp_path / "out", penalty=1e-3)
    job.run()
    model = Model.open(world.model)
    norm_h, embeddings_vh = model.tensor("model.norm.weight"), model.embeddings_vh()
    features, targets = [], []
    samples = {sample.state_key: sample for sample in world.dataset.samples()}
    import pyarrow.parquet as pq

    for record in pq.read_table(tmp_path / "out/files.parquet").to_pylist()[: manifest.train_samples]:
        sample = samples[record["state_key"]]
        states = load_file(tmp_path / "out" / record["file"])["hidden_states"].astype(np.float64)
        for t in range(sample.tokens - 1):
            if sample.loss_mask_s[t + 1]:
                seen = [*states[t, :3], embeddings_vh[sample.input_ids_s[t + 1]].astype(np.float64)]
                features.append(np.concatenate([*(x / np.sqrt((x**2).mean()) for x in seen), [1.0]]))
                final = states[t + 1, 3]
                targets.append(final / np.sqrt((final**2).mean() + model.rms_norm_eps) * norm_h)
    x, y = np.stack(features), np.stack(targets)
    penalty = 1e-3 * np.mean(np.diagonal(x.T @ x))
    padded = np.concatenate([x, np.sqrt(penalty) * np.eye(x.shape[1])])
    expected = np.linalg.lstsq(padded, np.concatenate([y, np.zeros((x.shape[1], 64))]), rcond=None)[0]
    found = load_file(tmp_path / "out/checkpoints/ridge/drafter.safetensors")
    assert np.abs(found["fc.weight"].T - expected[:-1]).max() < 2e-4
    assert np.abs(found["fc.bias"] - expected[-1]).max() < 2e-4


def test_ridge_agreement_collapses_when_two_thirds_of_the_states_are_swapped(
    shared_world: World, tmp_path: Path, model: Path, answers: list[Row]
) -> None:
    longest = max(len(ids) for ids, _ in answers)
    ids = [np.resize(ids_s, longest) for ids_s, _ in answers]
    moved = [n for n in range(len(ids)) if n % 3]
    instead = {n: ids[moved[(k + 1) % len(moved)]][: len(answers[n][0])] for k, n in enumerate(moved)}
    swapped = make_world(tmp_path / "swapped", model, answers, instead=instead)
    right, _, _ = run_ridge(hand_off_to_ridge(shared_world, tmp_path / "right"))
    wrong, _, _ = run_ridge(hand_off_to_ridge(swapped, tmp_path / "wrong"))
    assert wrong.metrics["held_out_agreement"] < 0.5 * right.metrics["held_out_agreement"]
    assert wrong.metrics["held_out_loss"] > 1.5 * right.metrics["held_out_loss"]


def test_ridge_job_refuses_a_file_of_another_prompt_by_name(world: World, tmp_path: Path) -> None:
    hand_off_to_ridge(world, tmp_path / "out")
    first, second = (tmp_path / f"out/states/hs_{n}.safetensors" for n in (1, 2))
    first.rename(tmp_path / "kept")
    second.rename(first)
    (tmp_path / "kept").rename(second)
    command = [sys.executable, "-m", "drafter_data.trainers.ridge_job", "--handoff", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("state-corrupt: states/hs_1.safetensors holds another prompt")
    assert not (tmp_path / "out/checkpoints").exists()
