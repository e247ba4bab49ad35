"""specforge 0.2.0, `specforge train`: one torch file a sample, the final state after the norm (extra `torch`).

    OUT/train/rows_<a>-<b>/data_<i>.ckpt, OUT/validation/…   in the hand-off's order, which is their lexicographic order
    OUT/specforge.yaml, OUT/draft_config.json, OUT/target/ (where the verifier's folder has no index)
    OUT/vocab_mapping/vocab_mapping.pt
    OUT/checkpoints/drafter-step<N>/training_state.pt   written by the job

A file holds `input_ids [S]` int64, `loss_mask [S]` int64, `aux_hidden_state [1, S, 3H]`, `hidden_state [1, S, H]`
(runtime/data_plane/offline_reader.py). SpecForge projects with an output matrix in bfloat16 whatever the run's dtype, so states of
a float32 or float16 store are written as bfloat16 unless the option `states_dtype` says `store`.

Tensor legend: S tokens, L stored layers, H hidden size.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np

from data_contracts.handoff import FILES_FILE, Checkpoint, HandoffManifest, SpaceNeed, TrainingPoint
from data_contracts.plan import Exclusion
from drafter_data.checkpoints import Checkpoint as Model
from drafter_data.dataset import Dataset, Sample
from drafter_data.errors import IdentityMismatch, TrainingFailed, UsageError
from drafter_data.files import read_ahead, write_atomic, xxh3_of
from drafter_data.store.store import Store
from drafter_data.trainers.card import write_card
from drafter_data.trainers.conversion import HashingFile, convert_rows, resuming, workers_of
from drafter_data.trainers.folder import CHECKPOINT_FOLDER, files_table, make_manifest, request_of, same_handoff, seal
from drafter_data.trainers.linked_view import model_of_store, refuse_selection, select_for
from drafter_data.trainers.options import environment_prefix, on_cpu, whole_number
from drafter_data.trainers.selection import HandoffRow, Selection, checked_state, state_bytes
from drafter_data.trainers.specforge_config import RUN_ID, draft_config, write_target, write_vocab_mapping, yaml_config
from drafter_data.trainers.verifier_norm import VerifierNorm, as_torch, require_torch
from drafter_data.trainers.vocabulary import count_supervised

CONFIG_FILE = "specforge.yaml"
_ROWS_A_FOLDER = 2000
_BLOCK_VALUES = 1 << 18
_CPU_SETTINGS = {
    "training.fsdp_sharding": "NO_SHARD",
    "training.attention_backend": "sdpa",
    "data.dataloader_num_workers": "0",
}
_LINE = re.compile(r"^step (\d+): \{.*'loss': (nan|-?inf|[-+]?[0-9][0-9.eE+-]*)")
_ACCURACY = re.compile(r"'acc_0': (nan|[-+]?[0-9][0-9.eE+-]*)")


class SpecForgeTrainer:
    """The Trainer seam for SpecForge."""

    name = "specforge"

    def needs(self, dataset: Dataset, store: Store) -> SpaceNeed:
        """Bytes on the target: every state is written again."""
        width = 4 if store.identity.dtype == "F32" else 2
        ours = state_bytes(dataset, store) * 2 // width + dataset.record.tokens * 16 + dataset.record.rows * 4096
        return SpaceNeed(bytes=ours, means="a converted copy of every state")

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
        """Converts the states in parallel; a killed conversion goes on where it stopped. States are checked as they are read.

        Raises InputError, UsageError (torch missing), IdentityMismatch (another model, another number of aux layers), LeaseHeld.
        """
        if len(store.identity.layers) != 4:
            raise IdentityMismatch(
                f"store {store.root} holds layers {store.identity.layers}; SpecForge takes three aux layers and the final one"
            )
        require_torch()
        checkpoint = model_of_store(model, store)
        selection = select_for(dataset, store, checkpoint, exclusions, options, read_whole=False)  # the conversion reads them whole
        request = request_of(self.name, dataset, store, selection, model, options)
        existing = same_handoff(out, request)
        if existing is not None:
            return existing
        with resuming(out, request) as folder:
            selection, table = _convert(folder, dataset, store, selection, checkpoint, options)
            refuse_selection(selection, dataset, store, exclusions, options)
            write_atomic(folder / FILES_FILE, table)
            manifest = make_manifest(
                self.name, out, dataset, store, selection, request=request, model=model, table=table, options=options
            )
            write_card(folder, manifest, dataset, selection)
            _write_settings(folder, manifest, checkpoint, dataset, selection, options)
            return seal(folder, manifest, self.command(manifest, options))

    def command(self, manifest: HandoffManifest, options: Mapping[str, str]) -> list[str]:
        """`specforge train -c specforge.yaml`; an option with a dot, such as `training.max_steps`, overrides a setting."""
        settings = {name: value for name, value in options.items() if "." in name and not name.startswith("env.")}
        environment: dict[str, str] = {}
        if on_cpu(options):
            environment = {"env.SPECFORGE_DEVICE": "cpu", "env.TRITON_INTERPRET": "1", "env.TORCHDYNAMO_DISABLE": "1"}
            settings = _CPU_SETTINGS | settings
        overrides = [f"{name}={value}" for name, value in sorted(settings.items())]
        processes = whole_number(options, "nproc")
        if processes:
            overrides.append(f"deployment.trainer.nproc_per_node={processes}")
        program = [options.get("python", sys.executable), "-m", "specforge.cli"]
        config = str(Path(manifest.folder) / CONFIG_FILE)
        return [*environment_prefix({**environment, **options}), *program, "train", "-c", config, *overrides]

    def progress(self, line: str) -> TrainingPoint | None:
        """A point from a line such as `step 3: {'acc_0': 0.11, …, 'loss': 9.95, …}`."""
        found, accuracy = _LINE.match(line), _ACCURACY.search(line)
        if found is None:
            return None
        return TrainingPoint(
            step=int(found.group(1)), loss=float(found.group(2)), accuracy=float(accuracy.group(1)) if accuracy else None
        )

    def finished(self, manifest: HandoffManifest, started_at: float) -> Checkpoint:
        """The newest checkpoint. Raises TrainingFailed."""
        folder = Path(manifest.folder) / CHECKPOINT_FOLDER
        steps = {int(path.name.rpartition("step")[2]): path for path in folder.glob(f"{RUN_ID}-step*") if not path.is_symlink()}
        if not steps:
            raise TrainingFailed(f"no checkpoint in {folder}", reason="no-checkpoint")
        state = steps[max(steps)] / "training_state.pt"
        _check_state(state, started_at)
        return Checkpoint(
            folder=str(state.parent), weights_file=str(state), bytes=state.stat().st_size, digest=xxh3_of(state), metrics={}
        )


def _convert(
    folder: Path, dataset: Dataset, store: Store, selection: Selection, model: Model, options: Mapping[str, str]
) -> tuple[Selection, bytes]:
    """Writes all samples; returns the selection without those whose state failed, and the table of the written files."""
    writer = SampleWriter(store, model.folder, options.get("states_dtype", "bfloat16"))
    train = len(selection.train)

    def file_of(n: int) -> str:
        place = n if n < train else n - train
        first = place // _ROWS_A_FOLDER * _ROWS_A_FOLDER
        part = "train" if n < train else "validation"
        return f"{part}/rows_{first:08d}-{first + _ROWS_A_FOLDER:08d}/data_{place:08d}.ckpt"

    workers = workers_of(options)
    with _settings_of_torch():
        converted, excluded = convert_rows(folder, dataset, selection.rows, file_of, writer.write, workers, writer.read_ahead)
    kept = sorted(converted)
    rows = [replace(selection.rows[n], bytes=converted[n].bytes, xxh3=converted[n].xxh3) for n in kept]
    both = sorted([*selection.exclusions, *excluded], key=lambda exclusion: exclusion.sample_key)
    return Selection(rows, both), files_table(rows, lambda k: file_of(kept[k]))


class SampleWriter:
    """Writes one sample's file from its state, which it reads whole and checks against its receipt."""

    def __init__(self, store: Store, model: Path, states_dtype: str) -> None:
        if states_dtype not in ("bfloat16", "store"):
            raise UsageError(f"option states_dtype: expected bfloat16 or store, found {states_dtype!r}", reason="bad-option")
        self._store = store
        self._torch, _ = require_torch()
        self._norm = VerifierNorm(model, store.identity.dtype) if store.identity.final_norm == "pre" else None
        self._dtype = self._torch.bfloat16 if states_dtype == "bfloat16" else None
        self._buffers = _Buffers()

    def read_ahead(self, row: HandoffRow) -> None:
        """Lets the disk begin with a state that is to be converted soon."""
        read_ahead(self._store.path_of(row.state_key))

    def write(self, row: HandoffRow, sample: Sample, out: HashingFile) -> None:
        """Raises SampleError, MalformedFile or StateCorrupt when the state is not what its receipt says."""
        with checked_state(self._store, row) as (file, receipt):
            states_slh = as_torch(file.array("hidden_states"), receipt.dtype)
            self._torch.save(self._tensors(states_slh, sample), out)

    def _tensors(self, states_slh: Any, sample: Sample) -> dict[str, Any]:
        tokens, layers, hidden = states_slh.shape
        dtype = self._dtype or states_slh.dtype
        aux_sh = self._buffers.tensor(0, (tokens, (layers - 1) * hidden), dtype)
        aux_sh.view(tokens, layers - 1, hidden).copy_(states_slh[:, :-1])
        final_sh = self._buffers.tensor(1, (tokens, hidden), dtype)
        step = max(1, _BLOCK_VALUES // hidden)
        for start in range(0, tokens, step):  # the norm works in float32, in several passes: blocks of it stay in the cache
            rows_rh = states_slh[start : start + step, -1]
            final_sh[start : start + step] = self._norm(rows_rh) if self._norm else rows_rh
        return {
            "input_ids": self._torch.from_numpy(sample.input_ids_s.astype("int64")),
            "loss_mask": self._torch.from_numpy(sample.loss_mask_s.astype("int64")),
            "aux_hidden_state": aux_sh[None],
            "hidden_state": final_sh[None],
        }


class _Buffers(threading.local):
    """Memory that each worker uses again for every sample: fresh memory of this size costs as much as the copy into it."""

    def __init__(self) -> None:
        self._arrays = [np.empty(0, np.uint8), np.empty(0, np.uint8)]

    def tensor(self, which: int, shape: tuple[int, ...], dtype: Any) -> Any:
        """A torch tensor over a buffer; its storage, which is what torch.save writes, is of exactly its size."""
        torch, _ = require_torch()
        size = prod(shape) * dtype.itemsize
        if len(self._arrays[which]) < size:
            self._arrays[which] = np.empty(size, np.uint8)
        return torch.from_numpy(self._arrays[which][:size]).view(dtype).view(shape)


@contextmanager
def _settings_of_torch() -> Generator[None]:
    """One thread in each operation, since samples are converted side by side; no CRC-32 in the files, which torch.load does not
    read, which takes longer than all else, and beside which the hand-off has its own checksums.
    """
    torch, _ = require_torch()
    threads, checksums = torch.get_num_threads(), torch.serialization.get_crc32_options()
    torch.set_num_threads(1)
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.serialization.set_crc32_options(checksums)


def _write_settings(
    folder: Path,
    manifest: HandoffManifest,
    model: Model,
    dataset: Dataset,
    selection: Selection,
    options: Mapping[str, str],
) -> None:
    draft_size = whole_number(options, "draft_vocab_size")
    target = write_target(folder / "target", model)
    if target == folder / "target":
        target = Path(manifest.folder) / "target"
    write_atomic(folder / "draft_config.json", json.dumps(draft_config(model, draft_size), indent=2))
    aux_layers = manifest.identity.layers[:-1]
    yaml = yaml_config(manifest, Path(manifest.folder), target, aux_layers=aux_layers, mapped=draft_size is not None)
    write_atomic(folder / CONFIG_FILE, yaml)
    if draft_size is not None:
        counts_v = count_supervised(dataset, selection.train, model.vocab_size)
        write_vocab_mapping(folder / "vocab_mapping" / "vocab_mapping.pt", counts_v, draft_size)


def _check_state(state: Path, started_at: float) -> None:
    """A complete fresh torch file: its zip directory is there and every record has its checksum. Nothing is unpickled."""
    if not state.is_file():
        raise TrainingFailed(f"no complete checkpoint: {state} missing", reason="no-checkpoint")
    if state.stat().st_mtime < started_at:
        raise TrainingFailed(f"{state} is older than the job: an earlier job's checkpoint", reason="stale-checkpoint")
    try:
        with ZipFile(state) as archive:
            broken = archive.testzip()
    except BadZipFile as error:
        raise TrainingFailed(f"the checkpoint {state} does not load: {error}", reason="bad-checkpoint") from error
    if broken is not None:
        raise TrainingFailed(f"the checkpoint {state} does not load: record {broken} is damaged", reason="bad-checkpoint")
