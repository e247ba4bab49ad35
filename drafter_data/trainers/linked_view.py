"""The view that needs no copy: the store's own files under the names that speculators expects. ridge reads the same.

OUT/data/                         what `datasets.load_from_disk` opens
OUT/states/hs_<row>.safetensors   the state of that dataset's row: a hard link into the store
OUT/vocabulary/                   token_freq.npy, d2t-<size>.npy, t2d-<size>.npy
OUT/files.parquet, OUT/manifest.json
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from data_contracts.handoff import FILES_FILE, HandoffManifest, SpaceNeed
from data_contracts.plan import Exclusion
from drafter_data.checkpoints import Checkpoint
from drafter_data.dataset import Dataset
from drafter_data.errors import GateClosed, IdentityMismatch, InputError
from drafter_data.files import write_atomic
from drafter_data.store.store import Store
from drafter_data.trainers.arrow_dataset import write_arrow_dataset
from drafter_data.trainers.card import write_card
from drafter_data.trainers.conversion import resuming
from drafter_data.trainers.folder import building, files_table, link_state, make_manifest, request_of, same_handoff, seal
from drafter_data.trainers.options import fraction, is_true, whole_number
from drafter_data.trainers.recovered_view import write_recovered_states
from drafter_data.trainers.selection import Selection, Verifier, nothing_left, select_rows
from drafter_data.trainers.vocabulary import count_supervised, write_vocabulary

DATA_FOLDER = "data"
STATES_FOLDER = "states"
VOCABULARY_FOLDER = "vocabulary"
_LINK_BYTES, _FILE_BYTES = 256, 4096
_ARROW_BYTES_A_TOKEN = 12


def linked_view_need(dataset: Dataset, recovered_from: Store | None = None) -> SpaceNeed:
    """Bytes on the target: token ids, masks and link entries. States are not copied, but those that have passed the norm for a
    trainer that must have them recovered (recovered_view.py).
    """
    record = dataset.record
    if recovered_from is not None and recovered_from.identity.final_norm == "post":
        bytes_of_states = record.tokens * recovered_from.identity.bytes_per_token + record.rows * _FILE_BYTES
        return SpaceNeed(bytes=bytes_of_states + record.tokens * _ARROW_BYTES_A_TOKEN, means="a recovered copy of every state")
    return SpaceNeed(bytes=record.tokens * _ARROW_BYTES_A_TOKEN + record.rows * _LINK_BYTES, means="hard links into the store")


def model_of_store(model: Path, store: Store) -> Checkpoint:
    """The verifier's checkpoint. Raises IdentityMismatch when the store's states come from other weights."""
    checkpoint = Checkpoint.open(model)
    digest = checkpoint.weights_digest()
    if digest != store.identity.weights_digest:
        raise IdentityMismatch(
            f"model {model} has weights {digest[:12]}, but the states of store {store.root} come from weights "
            f"{store.identity.weights_digest[:12]}; name the model that they were extracted with"
        )
    return checkpoint


def select_for(
    dataset: Dataset,
    store: Store,
    model: Checkpoint,
    exclusions: tuple[Exclusion, ...],
    options: Mapping[str, str],
    *,
    read_whole: bool | None = None,
) -> Selection:
    """The rows that a trainer may see, by the options `validation_share`, `verify_all` and `max_error_rate`.

    `read_whole` as in select_rows. Raises GateClosed or InputError as refuse_selection does.
    """
    selection = select_rows(
        dataset,
        store,
        Verifier(model.vocab_size, model.final_norm()),
        exclusions=exclusions,
        validation_share=fraction(options, "validation_share", 0.1),
        read_whole=True if is_true(options, "verify_all") and read_whole is None else read_whole,
    )
    refuse_selection(selection, dataset, store, exclusions, options)
    return selection


def refuse_selection(
    selection: Selection, dataset: Dataset, store: Store, exclusions: tuple[Exclusion, ...], options: Mapping[str, str]
) -> None:
    """Raises GateClosed when more rows failed here, after the gate, than the option `max_error_rate` allows, and InputError
    (`nothing-to-hand-off`) when fewer than two remain: one to learn from and one to hold out.
    """
    if not selection.train or not selection.validation:
        raise InputError(nothing_left(selection, dataset, store), reason="nothing-to-hand-off")
    known = {exclusion.sample_key for exclusion in exclusions}
    failed = [exclusion for exclusion in selection.exclusions if exclusion.sample_key not in known]
    if len(failed) > fraction(options, "max_error_rate", 0.0, or_one=True) * dataset.record.rows:
        reasons = Counter(exclusion.reason for exclusion in failed)
        raise GateClosed(
            f"{len(failed)} of {dataset.record.rows} rows cannot be handed off ("
            + ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
            + f"), for example: {failed[0].detail}; extract them again, or allow the share that you accept (max_error_rate)"
        )


def write_linked_view(
    trainer: str,
    dataset: Dataset,
    store: Store,
    out: Path,
    *,
    model: Path,
    exclusions: tuple[Exclusion, ...],
    options: Mapping[str, str],
    command: Callable[[HandoffManifest], list[str]],
    recover: bool = False,
) -> HandoffManifest:
    """Writes the view of every row that may be trained on into the folder `out`, all or nothing, and returns its manifest.

    `recover` copies the states instead of linking them (recovered_view.py); a killed copy goes on where it stopped. Returns the
    manifest that is there when `out` holds this very hand-off already. Raises InputError, UsageError, IdentityMismatch (another
    model) or StoreError; then nothing is left of links.
    """
    checkpoint = model_of_store(model, store)
    selection = select_for(dataset, store, checkpoint, exclusions, options, read_whole=True if recover else None)
    request = request_of(trainer, dataset, store, selection, model, options)
    existing = same_handoff(out, request)
    if existing is not None:
        return existing
    if recover:
        with resuming(out, request) as folder:
            selection = write_recovered_states(folder, dataset, store, selection, checkpoint, options, state_file)
            return _finish(trainer, folder, out, dataset, store, selection, checkpoint, request, options, command)
    with building(out) as folder:
        (folder / STATES_FOLDER).mkdir()
        for n, row in enumerate(selection.rows):
            link_state(store.path_of(row.state_key), folder / state_file(n), row.bytes)
        return _finish(trainer, folder, out, dataset, store, selection, checkpoint, request, options, command)


def _finish(
    trainer: str,
    folder: Path,
    out: Path,
    dataset: Dataset,
    store: Store,
    selection: Selection,
    model: Checkpoint,
    request: str,
    options: Mapping[str, str],
    command: Callable[[HandoffManifest], list[str]],
) -> HandoffManifest:
    """Everything beside the states, the manifest last."""
    table = files_table(selection.rows, state_file)
    manifest = make_manifest(
        trainer, out, dataset, store, selection, request=request, model=model.folder, table=table, options=options
    )
    write_atomic(folder / FILES_FILE, table)
    groups = [[row.row for row in part] for part in (selection.train, selection.validation)]
    write_arrow_dataset(folder / DATA_FOLDER, dataset, groups, request[:16])
    counts_v = count_supervised(dataset, selection.train, model.vocab_size)
    write_vocabulary(folder / VOCABULARY_FOLDER, counts_v, whole_number(options, "draft_vocab_size"))
    write_card(folder, manifest, dataset, selection)
    return seal(folder, manifest, command(manifest))


def state_file(row: int) -> str:
    """Where the state of the dataset's n-th row lies in the hand-off folder."""
    return f"{STATES_FOLDER}/hs_{row}.safetensors"
