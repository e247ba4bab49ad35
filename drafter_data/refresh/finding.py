"""Which generation runs have arrived, which of them are finished, and which have changed since they were last worked through."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any

import fsspec
import xxhash

from drafter_data.errors import InputError
from drafter_data.runs.sources import find_runs

_TIMES = ("mtime", "created", "LastModified", "last_modified", "updated", "Last-Modified")
"""Where file systems of fsspec keep the time of the last change; of several the latest counts."""
_VERSIONS = ("ETag", "etag", "md5Hash", "content_md5")


@dataclass(frozen=True)
class ArrivedRun:
    """A run that was found. `digest` changes with its files; `changed_at` (seconds since 1970) is None where nobody knows."""

    source: str
    digest: str
    changed_at: float | None
    marked: bool

    def finished(self, settled_seconds: float | None, now: float) -> bool:
        """By its marker, or since nothing in it changed for so long (None: never)."""
        if self.marked:
            return True
        return settled_seconds is not None and self.changed_at is not None and now - self.changed_at >= settled_seconds


@dataclass(frozen=True)
class Arrivals:
    """Finished runs, those that are left for the next night, and those that were there before and are gone (or being rewritten)."""

    finished: tuple[ArrivedRun, ...]
    waiting: tuple[str, ...]
    gone: tuple[str, ...]
    new: tuple[str, ...]

    @property
    def digests(self) -> dict[str, str]:
        """What was worked through, when these were."""
        return {run.source: run.digest for run in self.finished}


def look_for_runs(places: Sequence[str], known: Mapping[str, str], *, marker: str, settled_seconds: float | None) -> Arrivals:
    """Looks into folders and URL patterns; `known` has the digests of the runs that were worked through.

    Raises InputError (`run-missing`) for a place that is not there and is no pattern.
    """
    now = time.time()
    arrived = {run.source: run for place in places for run in _runs_at(place, marker)}
    finished = tuple(run for _, run in sorted(arrived.items()) if run.finished(settled_seconds, now))
    names = {run.source for run in finished}
    return Arrivals(
        finished=finished,
        waiting=tuple(sorted(set(arrived) - names)),
        gone=tuple(sorted(set(known) - names)),
        new=tuple(run.source for run in finished if known.get(run.source) != run.digest),
    )


def _runs_at(place: str, marker: str) -> Iterator[ArrivedRun]:
    try:
        fs, path = fsspec.url_to_fs(place)
        fs.invalidate_cache()
        found = _candidates(fs, path.rstrip("/"))
    except FileNotFoundError:
        raise InputError(f"{place}: no such folder of generation runs", reason="run-missing") from None
    except (OSError, ValueError, ImportError) as error:
        raise InputError(f"{place}: cannot be looked into: {error}", reason="run-unreadable") from error
    for candidate in found:
        name = PurePosixPath(candidate).name
        if name.startswith((".", "_")) or name.endswith(f".{marker}"):
            continue
        source = fs.unstrip_protocol(candidate) if "://" in place or "::" in place else candidate
        if _has_rows(source):
            yield _arrived(fs, candidate, source, marker)


def _candidates(fs: Any, path: str) -> list[str]:
    if any(letter in path for letter in "*?["):
        return sorted(str(one).rstrip("/") for one in fs.glob(path))
    if fs.isdir(path):
        return sorted(str(one).rstrip("/") for one in fs.ls(path, detail=False))
    if fs.exists(path):
        return [path]
    raise FileNotFoundError(path)


def _has_rows(source: str) -> bool:
    """A folder that nothing has come into yet, or a file of another kind, is no run."""
    try:
        find_runs([source])
    except InputError as error:
        if error.reason == "run-empty":
            return False
        raise
    return True


def _arrived(fs: Any, path: str, source: str, marker: str) -> ArrivedRun:
    folder = fs.isdir(path)
    files: dict[str, Any] = fs.find(path, detail=True) if folder else {path: fs.info(path)}
    digest, times = xxhash.xxh3_128(), list[float | None]()
    for name, info in sorted(files.items()):
        changed = _changed_at(info)
        times.append(changed)
        version = next((str(info[key]) for key in _VERSIONS if info.get(key)), changed)
        digest.update(f"{name}\n{info.get('size')}\n{version}\n".encode())
    known = [one for one in times if one is not None]
    return ArrivedRun(
        source=source,
        digest=digest.hexdigest(),
        changed_at=max(known) if known and len(known) == len(times) else None,
        marked=fs.exists(f"{path}/{marker}" if folder else f"{path}.{marker}"),
    )


def _changed_at(info: Mapping[str, Any]) -> float | None:
    found = [_seconds(info[key]) for key in _TIMES if info.get(key) is not None]
    return max((one for one in found if one is not None), default=None)


def _seconds(value: object) -> float | None:
    if isinstance(value, (int, float)):
        return float(value)
    try:
        return (value if isinstance(value, datetime) else datetime.fromisoformat(str(value))).timestamp()
    except ValueError:
        return None
