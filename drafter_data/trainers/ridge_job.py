"""The training job of the trainer `ridge`: `python -m drafter_data.trainers.ridge_job --handoff DIR`.

Reads every handed-off file once, for the fit (training split) or for the score (held-out split), prints a line a step, and writes
`DIR/checkpoints/ridge/drafter.safetensors` and then metrics.json. Exit 0 done, 1 failed, 2 bad input.

Tensor legend: S tokens, L stored layers, H hidden size, D features.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from data_contracts.handoff import HandoffManifest
from drafter_data.checkpoints import Checkpoint
from drafter_data.errors import DrafterDataError, StateCorrupt, TrainingFailed
from drafter_data.files import atomic_path, write_atomic, xxh3_of
from drafter_data.safetensors_file import TensorFile, as_float32
from drafter_data.trainers.arrow_dataset import read_arrow_dataset
from drafter_data.trainers.folder import CHECKPOINT_FOLDER, read_files_table, read_manifest
from drafter_data.trainers.linked_view import DATA_FOLDER
from drafter_data.trainers.ridge_fit import HeldOut, NormalEquations, Positions, VerifierTensors, positions_of

WEIGHTS_FILE = "drafter.safetensors"
METRICS_FILE = "metrics.json"
RIDGE_FOLDER = "ridge"
DEFAULT_PENALTY = 1e-4
_EARLY_SCORES_UP_TO_FEATURES = 2048
"""With more features a solution takes seconds and more: only the last one is computed."""
_EARLY_SCORE_SAMPLES = 16


class RidgeJob:
    """One fit over one hand-off folder."""

    def __init__(self, handoff: Path, penalty: float = DEFAULT_PENALTY) -> None:
        self.handoff = handoff
        self.penalty = penalty
        self.manifest = read_manifest(handoff)
        self.verifier = _verifier_tensors(self.manifest)
        self._started = time.monotonic()

    def run(self) -> dict[str, float]:
        """Fits, scores and saves; returns the metrics. Raises DrafterDataError."""
        identity, samples = self.manifest.identity, self.manifest.train_samples
        equations = NormalEquations(len(identity.layers) * identity.hidden_size + 1, identity.hidden_size)
        scored_at: set[int] = set()
        early: list[Positions] = []
        if len(equations.xx_dd) <= _EARLY_SCORES_UP_TO_FEATURES:
            scored_at = {max(1, samples * share // 16) for share in (1, 2, 4, 8)} - {samples}
            early = list(islice(self._positions("validation"), _EARLY_SCORE_SAMPLES))
        for step, positions in enumerate(self._positions("train"), start=1):
            equations.add(positions)
            if step in scored_at:
                self._say(step, self._score(equations.solve(self.penalty), early))
        weights_dh = equations.solve(self.penalty)
        scored = self._score(weights_dh, self._positions("validation"))
        self._say(samples, scored)
        if not np.isfinite(scored.loss) or not np.isfinite(weights_dh).all():
            raise TrainingFailed("the fit is not finite: a state holds NaN or infinite values", reason="nan-loss")
        return self._save(weights_dh, equations, scored)

    def _positions(self, split: str) -> Iterator[Positions]:
        """What each sample of a split gives, in the hand-off's order. Raises StateCorrupt for a file that is not the row's."""
        files = read_files_table(self.handoff).select(["file", "split", "sample_key"]).to_pylist()
        for file, (ids_s, mask_s) in zip(files, read_arrow_dataset(self.handoff / DATA_FOLDER), strict=True):
            if file["split"] != split:
                continue
            with TensorFile.open(self.handoff / file["file"]) as state:
                if not np.array_equal(state.array("token_ids"), ids_s):
                    raise StateCorrupt(
                        f"{file['file']} holds another prompt than row {file['sample_key'][:12]} of the dataset; hand off again"
                    )
                states_slh = as_float32(state.array("hidden_states"), state.tensors["hidden_states"].dtype)
            yield positions_of(states_slh, ids_s, mask_s, self.verifier)

    def _score(self, weights_dh: NDArray[np.float32], held_out: Iterable[Positions]) -> HeldOut:
        scored = HeldOut(weights_dh, self.verifier.lm_head_vh)
        for positions in held_out:
            scored.add(positions)
        return scored

    def _say(self, step: int, scored: HeldOut) -> None:
        print(  # noqa: T201 - the job's output is its interface
            f"step={step}/{self.manifest.train_samples} loss={scored.loss:.6f} agreement={scored.agreement:.4f} "
            f"baseline={scored.baseline:.4f} seconds={time.monotonic() - self._started:.1f}",
            flush=True,
        )

    def _save(self, weights_dh: NDArray[np.float32], equations: NormalEquations, scored: HeldOut) -> dict[str, float]:
        folder = self.handoff / CHECKPOINT_FOLDER / RIDGE_FOLDER
        tensors = {"fc.weight": np.ascontiguousarray(weights_dh[:-1].T), "fc.bias": np.ascontiguousarray(weights_dh[-1])}
        with atomic_path(folder / WEIGHTS_FILE) as temporary:
            save_file(tensors, temporary, metadata={"dataset_id": self.manifest.dataset_id})
        metrics = {
            "held_out_loss": scored.loss,
            "held_out_agreement": scored.agreement,
            "baseline_agreement": scored.baseline,
            "held_out_positions": float(scored.positions),
            "train_positions": float(equations.positions),
            "seconds": time.monotonic() - self._started,
        }
        record = {
            "metrics": metrics,
            "weights_xxh3": xxh3_of(folder / WEIGHTS_FILE),
            "penalty": self.penalty,
            "dataset_id": self.manifest.dataset_id,
            "layers": self.manifest.identity.layers,
        }
        write_atomic(folder / METRICS_FILE, json.dumps(record, indent=2))
        return metrics


def _verifier_tensors(manifest: HandoffManifest) -> VerifierTensors:
    model = Checkpoint.open(Path(manifest.model))
    norm = model.final_norm() if manifest.identity.final_norm == "pre" else None
    return VerifierTensors(model.embeddings_vh(), model.lm_head_vh(), norm)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the job; one clear line on stderr when it fails."""
    parser = argparse.ArgumentParser(prog="python -m drafter_data.trainers.ridge_job", description=__doc__)
    parser.add_argument("--handoff", type=Path, required=True, help="hand-off folder")
    parser.add_argument("--penalty", type=float, default=DEFAULT_PENALTY, help="relative to the mean feature variance")
    arguments = parser.parse_args(argv)
    try:
        metrics = RidgeJob(arguments.handoff, arguments.penalty).run()
    except DrafterDataError as error:
        print(f"{error.reason}: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    print("done " + " ".join(f"{name}={value:.6g}" for name, value in metrics.items()), flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
