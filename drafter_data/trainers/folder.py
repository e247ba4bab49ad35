"""The hand-off folder: written under a temporary name beside its final one, renamed whole, checkable for ever after."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from pydantic import ValidationError

from data_contracts.handoff import FILE_COLUMNS, FILES_FILE, MANIFEST_FILE, HandoffManifest
from data_contracts.validation import Finding
from drafter_data.dataset import Dataset, arrow_schema
from drafter_data.errors import InputError, StoreError
from drafter_data.files import NO_HARD_LINK, fsync_folder, temporary_name, write_atomic, xxh3_of
from drafter_data.store.store import Store
from drafter_data.trainers.selection import HandoffRow, Selection
from drafter_data.version import code_version, version_in

PROGRESS_FILE = "converted.jsonl"
"""A conversion's own record while it runs; no part of the hand-off."""
CHECKPOINT_FOLDER = "checkpoints"
"""Where a training job writes, inside the hand-off folder."""


@contextmanager
def building(out: Path) -> Generator[Path]:
    """Yields a folder that becomes `out` on success and is removed on any failure.

    Raises InputError (`handoff-folder`) when `out` is there already and is not an empty folder, or cannot be written.
    """
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise InputError(f"{out} is not an empty folder; name another one for the hand-off", reason="handoff-folder")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = out.parent.resolve() / temporary_name(out.name)
        temporary.mkdir()
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror}; name a writable folder", reason="handoff-folder") from error
    try:
        yield temporary
        fsync_folder(temporary)
        temporary.replace(out)
        fsync_folder(out.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def seal(folder: Path, manifest: HandoffManifest, command: list[str]) -> HandoffManifest:
    """Writes the manifest into a folder that is else complete, with the checksums of all that the table does not list."""
    checksums = _checksums_of_others(folder)
    complete = manifest.model_copy(update={"other_files": checksums, "command": tuple(command)})
    write_atomic(folder / MANIFEST_FILE, complete.model_dump_json(indent=2))
    return complete


def link_state(source: Path, link: Path, size: int) -> None:
    """Gives a state file a second name without a copy: a hard link, or across file systems a relative symbolic link.

    Raises StoreError when what was linked is not of the size that was checked.
    """
    try:
        os.link(source, link)
    except OSError as error:
        if error.errno not in NO_HARD_LINK:
            raise
        link.symlink_to(os.path.relpath(source.resolve(), link.parent))
    if link.stat().st_size != size:
        raise StoreError(f"{source} changed during the hand-off: expected {size} bytes, found {link.stat().st_size}; try again")


def files_table(rows: list[HandoffRow], file_of: Callable[[int], str]) -> bytes:
    """The bytes of files.parquet; `file_of` names the file of the n-th row."""
    records = [{**asdict(row), "file": file_of(n)} for n, row in enumerate(rows)]
    columns = {name: [record[name] for record in records] for name in FILE_COLUMNS}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns, schema=arrow_schema(FILE_COLUMNS)), sink, row_group_size=65_536)
    return sink.getvalue().to_pybytes()


def request_of(trainer: str, dataset: Dataset, store: Store, selection: Selection, model: Path, options: Mapping[str, str]) -> str:
    """xxh3-128 hex over all that a hand-off is made from: equal requests give equal views."""
    digest = xxhash.xxh3_128(files_table(selection.rows, str))
    rest = [trainer, dataset.record.dataset_id, store.identity.model_dump_json(), str(model.absolute())]
    exclusions = [exclusion.model_dump_json(exclude={"detail"}) for exclusion in selection.exclusions]
    digest.update(json.dumps([*rest, sorted(options.items()), exclusions]).encode())
    return digest.hexdigest()


def make_manifest(
    trainer: str,
    folder: Path,
    dataset: Dataset,
    store: Store,
    selection: Selection,
    *,
    request: str,
    model: Path,
    table: bytes,
    options: Mapping[str, str],
) -> HandoffManifest:
    """The manifest of a hand-off, still without its command and its further files. `folder` is the final one."""
    rows = selection.rows
    return HandoffManifest(
        trainer=trainer,
        folder=str(folder.absolute()),
        dataset=str(dataset.folder.absolute()),
        dataset_id=dataset.record.dataset_id,
        store=str(store.root.absolute()),
        request=request,
        identity=store.identity,
        provenance=store.provenances(),
        canaries=store.canaries(),
        model=str(model.absolute()),
        samples=len(rows),
        train_samples=len(selection.train),
        validation_samples=len(selection.validation),
        tokens=sum(row.num_tokens for row in rows),
        supervised_tokens=sum(row.num_supervised for row in rows),
        bytes=sum(row.bytes for row in rows),
        longest_tokens=max(row.num_tokens for row in rows),
        files_xxh3=xxhash.xxh3_128(table).hexdigest(),
        exclusions=tuple(selection.exclusions),
        options=dict(sorted(options.items())),
        code_version=code_version(),
        trainer_version=version_in(options.get("python", sys.executable), trainer),
    )


def _checksums_of_others(folder: Path) -> dict[str, str]:
    """xxh3-128 hex of every file that is neither a state nor the table nor a link (to the verifier), by its path in the folder."""
    listed = {FILES_FILE, PROGRESS_FILE, *read_files_table(folder).column("file").to_pylist()}
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {name: xxh3_of(folder / name) for name in names if name not in listed}


def read_manifest(folder: Path) -> HandoffManifest:
    """The manifest of a finished hand-off. Raises InputError when there is none."""
    path = folder / MANIFEST_FILE
    try:
        return HandoffManifest.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise InputError(f"no hand-off at {folder}: expected {MANIFEST_FILE} in it", reason="handoff-missing") from error
    except ValidationError as error:
        raise InputError(
            f"{path} is not a hand-off manifest: {error.errors()[0]['msg']}; hand off again into a new folder",
            reason="handoff-manifest-invalid",
        ) from error


def read_files_table(folder: Path) -> pa.Table:
    """files.parquet of a hand-off folder."""
    return pq.read_table(folder / FILES_FILE, schema=arrow_schema(FILE_COLUMNS))


def same_handoff(out: Path, request: str) -> HandoffManifest | None:
    """The manifest at `out` when that folder is a finished hand-off of this very request, else None."""
    if not (out / MANIFEST_FILE).is_file():
        return None
    found = read_manifest(out)
    return found if found.request == request else None


def check_folder(folder: Path, *, sizes_only: bool = False) -> list[Finding]:
    """Compares a hand-off folder with its manifest: every file there, of its size and (unless `sizes_only`) its checksum."""
    manifest = read_manifest(folder)
    findings: list[Finding] = []
    expected = {name: ("", None, digest) for name, digest in manifest.other_files.items()} | {
        FILES_FILE: ("", None, manifest.files_xxh3)
    }
    for name, (key, size, digest) in expected.items():
        findings += _check_file(folder, name, key, size, digest)
    if any(finding.file == FILES_FILE for finding in findings):
        return findings  # the table says what the other files should be
    columns = read_files_table(folder).to_pydict()
    for name, key, size, digest in zip(columns["file"], columns["state_key"], columns["bytes"], columns["xxh3"], strict=True):
        findings += _check_file(folder, name, key, size, None if sizes_only else digest)
    return findings


def _check_file(folder: Path, name: str, key: str, size: int | None, digest: str | None) -> list[Finding]:
    path = folder / name
    if not path.is_file():
        return [_finding("file-missing", key, name, "a file", "none")]
    if size is not None and path.stat().st_size != size:
        return [_finding("file-size", key, name, f"{size} bytes", f"{path.stat().st_size} bytes")]
    if digest is not None and (found := xxh3_of(path)) != digest:
        return [_finding("checksum", key, name, digest, found)]
    return []


def _finding(reason: str, key: str, name: str, expected: str, found: str) -> Finding:
    remedy = "hand off again into a new folder"
    return Finding(reason=reason, state_key=key, file=name, expected=expected, found=found, remedy=remedy)
