"""Whether generation runs have changed since they were last worked through: names, sizes and times of their files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from data_contracts.record import Record
from drafter_data.files import write_atomic

MARK_FILE = "refreshed.json"


class RunFile(Record):
    """A file of a run."""

    path: str
    bytes: int
    modified_ns: int


class RunsMark(Record):
    """All files of the named runs, sorted by path."""

    files: tuple[RunFile, ...] = ()


def runs_mark(sources: Sequence[str]) -> RunsMark:
    """Looks at local files and folders; hidden and unfinished ones (a leading dot) do not count."""
    files: dict[str, RunFile] = {}
    for source in sources:
        root = Path(source).expanduser().absolute()
        for path in [root] if root.is_file() else sorted(root.rglob("*")):
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root.parent).parts):
                status = path.stat()
                files[str(path)] = RunFile(path=str(path), bytes=status.st_size, modified_ns=status.st_mtime_ns)
    return RunsMark(files=tuple(files[path] for path in sorted(files)))


def read_mark(folder: Path) -> RunsMark | None:
    """The mark of the last complete run; None where there is none or it is not readable, so that the runs count as new."""
    try:
        return RunsMark.model_validate_json((folder / MARK_FILE).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def write_mark(folder: Path, mark: RunsMark) -> None:
    """Writes down what was worked through."""
    write_atomic(folder / MARK_FILE, mark.model_dump_json(indent=1))
