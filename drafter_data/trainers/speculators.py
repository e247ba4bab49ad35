"""speculators 0.9.0, `speculators train --speculator-type eagle3`, over the linked view (linked_view.py).

A state file is byte for byte what its reader takes: `token_ids [S]` int64, `hidden_states [S, 4, H]` with the last one before the
norm (speculators/train/data.py). Its split is positional: the first int(rows x ratio) rows are for training. A job writes
`OUT/checkpoints/<epoch>/`: model.safetensors, config.json and, last, training_state.json.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from data_contracts.handoff import Checkpoint, HandoffManifest, SpaceNeed, TrainingPoint
from data_contracts.plan import Exclusion
from drafter_data.dataset import Dataset
from drafter_data.errors import IdentityMismatch, TrainingFailed, UsageError
from drafter_data.store.store import Store
from drafter_data.trainers.checkpoint_files import fresh_checkpoint
from drafter_data.trainers.cpu import run_speculators
from drafter_data.trainers.folder import CHECKPOINT_FOLDER
from drafter_data.trainers.linked_view import DATA_FOLDER, STATES_FOLDER, VOCABULARY_FOLDER, linked_view_need, write_linked_view
from drafter_data.trainers.options import environment_prefix, flag_list, is_true, on_cpu, trainer_flags, whole_number
from drafter_data.trainers.recovered_view import OPTION as RECOVER

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float32"}
"""Its reader refuses float16; float32 holds every float16."""
_DEFAULT_SEQUENCE_TOKENS = 8192
_NUMBER = r"(nan|-?inf|[-+]?[0-9][0-9.eE+-]*)"
_LOSS = re.compile(rf"train/loss={_NUMBER}")
_STEP = re.compile(r"global_step=(\d+)")
_ACCURACY = re.compile(rf"train/full_acc_0={_NUMBER}")


class SpeculatorsTrainer:
    """The Trainer seam for speculators."""

    name = "speculators"

    def needs(self, dataset: Dataset, store: Store) -> SpaceNeed:
        """Bytes on the target; states are linked unless they must be recovered from after the norm."""
        return linked_view_need(dataset, store)

    def materialise(
        self,
        dataset: Dataset,
        store: Store,
        out: Path,
        *,
        model: Path,
        exclusions: tuple[Exclusion, ...],
        options: Mapping[str, str],
    ) -> HandoffManifest:
        """Writes the view; see write_linked_view. Raises IdentityMismatch for post-norm states that are not to be recovered."""
        recover = is_true(options, RECOVER)
        if store.identity.final_norm != "pre" and not recover:
            raise IdentityMismatch(
                f"store {store.root} holds final states after the norm; speculators norms them itself and needs them before it; "
                f"hand off to specforge, extract with final_norm: pre, or take them as post / scale ({RECOVER}=true)"
            )
        if store.identity.final_norm == "pre" and recover:
            raise UsageError(f"option {RECOVER}: store {store.root} holds final states before the norm", reason="bad-option")
        return write_linked_view(
            self.name,
            dataset,
            store,
            out,
            model=model,
            exclusions=exclusions,
            options=options,
            command=lambda manifest: self.command(manifest, options),
            recover=recover,
        )

    def command(self, manifest: HandoffManifest, options: Mapping[str, str]) -> list[str]:
        """The training command; options that the hand-off does not read become its flags."""
        folder = Path(manifest.folder)
        flags = {
            "--speculator-type": "eagle3",
            "--verifier-name-or-path": manifest.model,
            "--data-path": str(folder / DATA_FOLDER),
            "--hidden-states-path": str(folder / STATES_FOLDER),
            "--on-missing": "raise",
            "--save-path": str(folder / CHECKPOINT_FOLDER),
            "--target-layer-ids": " ".join(str(layer) for layer in manifest.identity.layers[:-1]),
            "--hidden-states-dtype": _DTYPES[manifest.identity.dtype],
            "--train-data-ratio": repr(train_ratio(manifest.train_samples, manifest.samples)),
            "--total-seq-len": str(_sequence_tokens(manifest, options)),
            "--no-resume-from-checkpoint": "true",
        }
        if on_cpu(options):
            flags |= {"--num-workers": "0", "--draft-attn-impl": "sdpa", "--loss-implementation": "eager"}
        draft_size = whole_number(options, "draft_vocab_size")
        if draft_size is not None:
            vocabulary = folder / VOCABULARY_FOLDER
            flags["--draft-vocab-size"] = str(draft_size)
            flags["--d2t-path"] = str(vocabulary / f"d2t-{draft_size}.npy")
            flags["--t2d-path"] = str(vocabulary / f"t2d-{draft_size}.npy")
        return [*environment_prefix(options), *_launcher(options), *flag_list(flags | trainer_flags(options))]

    def progress(self, line: str) -> TrainingPoint | None:
        """A point from a metrics line such as `train/loss=3.412, …, global_step=17`."""
        loss, step, accuracy = _LOSS.search(line), _STEP.search(line), _ACCURACY.search(line)
        if loss is None or step is None:
            return None
        return TrainingPoint(
            step=int(step.group(1)), loss=float(loss.group(1)), accuracy=float(accuracy.group(1)) if accuracy else None
        )

    def finished(self, manifest: HandoffManifest, started_at: float) -> Checkpoint:
        """The checkpoint of the last finished epoch, with its validation metrics. Raises TrainingFailed."""
        folder = Path(manifest.folder) / CHECKPOINT_FOLDER
        epochs = [path for path in folder.glob("*") if path.name.isdigit() and not path.is_symlink()]
        if not epochs:
            raise TrainingFailed(f"no checkpoint of a finished epoch in {folder}", reason="no-checkpoint")
        last = max(epochs, key=lambda path: int(path.name))
        required = ("config.json", "training_state.json")
        checkpoint = fresh_checkpoint(last, last / "model.safetensors", required, started_at)
        return checkpoint.model_copy(update={"metrics": _validation_metrics(last / "val_metrics.json")})


def train_ratio(train_rows: int, rows: int) -> float:
    """A ratio r in (0, 1) with int(rows * r) == train_rows, which is how speculators cuts its dataset."""
    return (train_rows + 0.5) / rows


def _validation_metrics(path: Path) -> dict[str, float]:
    """Held-out loss and top-1 agreement of the draft's first step, where that epoch was validated and the best."""
    if not path.is_file():
        return {}
    found = json.loads(path.read_bytes())
    names = {"loss_epoch": "held_out_loss", "full_acc_0_epoch": "held_out_agreement"}
    return {ours: float(found[theirs]) for theirs, ours in names.items() if theirs in found}


def _sequence_tokens(manifest: HandoffManifest, options: Mapping[str, str]) -> int:
    """Tokens of a packed sequence. Raises UsageError when one is asked for that would cut the longest sample."""
    asked = whole_number(options, "total_seq_len")
    if asked is not None and asked < manifest.longest_tokens:
        raise UsageError(
            f"option total_seq_len: expected at least {manifest.longest_tokens}, the longest sample, found {asked}",
            reason="bad-option",
        )
    return asked or max(_DEFAULT_SEQUENCE_TOKENS, -(-manifest.longest_tokens // 128) * 128)


def _launcher(options: Mapping[str, str]) -> list[str]:
    python = options.get("python", sys.executable)
    script = options.get("script") or (run_speculators.__file__ if on_cpu(options) else None)
    if script:
        return [python, script, "train"]
    processes = whole_number(options, "nproc")
    if processes:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        return [python, *torchrun, "-m", "speculators.train"]
    return [python, "-m", "speculators", "train"]
