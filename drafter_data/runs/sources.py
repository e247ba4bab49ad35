"""From what the user names to runs and their files.

A run is one file, or a folder with all its files; a URL that fsspec knows stands for either. A run's name is its file or
folder name without suffix; where two runs share it, as many parent folders as it takes are put in front.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

import fsspec
from fsspec.implementations.local import LocalFileSystem

from data_contracts.dataset import RECORD_FILE, ROWS_FILE
from drafter_data.errors import InputError

Form = Literal["json", "parquet", "arrow"]
Codec = Literal["gzip", "zstd"]
_FORMS: Final[dict[str, Form]] = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_CODECS: Final[dict[str, Codec]] = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_NO_ROWS: Final = ("dataset_info.json", "state.json", "dataset_dict.json")
"""Files of a saved `datasets` folder that hold no rows."""


@dataclass(frozen=True, slots=True)
class RunFile:
    """One file with rows. `name` is relative to the run; `url` is what fsspec opens."""

    name: str
    url: str
    form: Form
    codec: Codec | None
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """One generation run. `skipped` names files in its folder that hold no rows."""

    name: str
    source: str
    files: tuple[RunFile, ...]
    skipped: tuple[str, ...] = field(default=())


def find_runs(sources: Sequence[str]) -> tuple[Run, ...]:
    """The runs that the user named, by name. Raises InputError where one is not there, is empty or is named twice."""
    if not sources:
        raise InputError("no generation runs given: name at least one file or folder", reason="runs-missing")
    located = [_locate(source) for source in sources]
    twice = [
        source
        for (_, path), times in Counter((fs.protocol, path) for fs, path in located).items()
        if times > 1
        for source in [path]
    ]
    if twice:
        raise InputError(f"{twice[0]}: this generation run is named twice; name it once", reason="run-named-twice")
    names = _names([path for _, path in located])
    runs = [_find_run(name, fs, path, source) for name, (fs, path), source in zip(names, located, sources, strict=True)]
    return tuple(sorted(runs, key=lambda run: run.name))


def split_name(name: str) -> tuple[str, Form | None, Codec | None]:
    """Stem, form and codec of a file name: `a.jsonl.gz` is (`a`, json, gzip)."""
    path = PurePosixPath(name)
    codec = _CODECS.get(path.suffix.lower())
    if codec is not None:
        path = path.with_suffix("")
    form = _FORMS.get(path.suffix.lower())
    return (path.stem if form is not None else name), form, codec


def _locate(source: str) -> tuple[Any, str]:
    if not source:
        raise InputError("a generation run without a name; expected a file, a folder or a URL", reason="run-missing")
    try:
        fs, path = fsspec.url_to_fs(source)
    except (ValueError, ImportError, OSError) as error:
        raise InputError(f"{source}: cannot be opened: {error}", reason="run-unreadable") from error
    return fs, path.rstrip("/") or "/"


def _names(paths: Sequence[str]) -> list[str]:
    parts = [PurePosixPath(path).parts for path in paths]
    names = [split_name(p[-1])[0] for p in parts]
    depth = 1
    while len(set(names)) < len(names) and depth < max(map(len, parts)):
        depth += 1
        clash = {name for name, times in Counter(names).items() if times > 1}
        names = [
            "/".join((*p[-depth:-1], split_name(p[-1])[0])) if name in clash else name for name, p in zip(names, parts, strict=True)
        ]
    if len(set(names)) < len(names):  # a.jsonl beside a.parquet: the suffix tells them apart
        clash = {name for name, times in Counter(names).items() if times > 1}
        names = [p[-1] if name in clash else name for name, p in zip(names, parts, strict=True)]
    return names


def _find_run(name: str, fs: Any, path: str, source: str) -> Run:
    try:
        if fs.isdir(path):
            listed = {found: _size_of(info) for found, info in fs.find(path, detail=True).items()}
        elif fs.exists(path):
            listed = {path: _size_of(fs.info(path))}
        else:
            raise InputError(f"{source}: no such generation run; expected a file, a folder or a URL", reason="run-missing")
    except OSError as error:
        raise InputError(f"{source}: cannot be read: {error.strerror or error}", reason="run-unreadable") from error
    foreign = next((found for found in listed if not _is_unicode(found)), None)
    if foreign is not None:
        raise InputError(f"{foreign!a}: a file name that is no UTF-8; rename it", reason="run-unreadable")
    if listed == {path: None}:
        raise InputError(f"{source}: a pipe, socket or device; expected a file or a folder", reason="run-unreadable")
    files, skipped = _sort_files(fs, path, listed)
    if not files:
        found = f"only {', '.join(skipped[:3])}" if skipped else "no file"
        raise InputError(
            f"{source}: no rows to read: expected {', '.join(_FORMS)} (or .gz, .zst of JSON), found {found}", reason="run-empty"
        )
    if not any(file.size_bytes for file in files):
        raise InputError(f"{source}: an empty generation run: expected rows, found 0 bytes", reason="run-empty")
    return Run(name, source, files, skipped)


def _is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _size_of(info: dict[str, Any]) -> int | None:
    """Bytes of a file; None for what is no file (a pipe would be waited for without end)."""
    dangling = info.get("islink") and not Path(info["name"]).exists()  # is opened, so that its name stands in the refusal
    return None if info.get("type") == "other" and not dangling else int(info["size"] or 0)


def _sort_files(fs: Any, root: str, listed: dict[str, int | None]) -> tuple[tuple[RunFile, ...], tuple[str, ...]]:
    files: list[RunFile] = []
    skipped: list[str] = []
    ours = f"{root}/{RECORD_FILE}" in listed  # a finished dataset: its rows are one file, the rest is about them
    for path, size in sorted(listed.items()):
        name = path.removeprefix(root).lstrip("/") or PurePosixPath(path).name
        _, form, codec = split_name(name)
        hidden = any(part.startswith((".", "_")) for part in PurePosixPath(name).parts)
        about = PurePosixPath(name).name in _NO_ROWS or (ours and name != ROWS_FILE)
        alone = path == root
        if size is None or form is None or (codec is not None and form != "json") or (not alone and (hidden or about)):
            skipped.append(name)
        else:
            files.append(RunFile(name, _url(fs, path), form, codec, size))
    return tuple(files), tuple(skipped)


def _url(fs: Any, path: str) -> str:
    return path if isinstance(fs, LocalFileSystem) else fs.unstrip_protocol(path)
