"""Leaving dumps: labelled as our SGLang capture does (data_contracts/dump.py), or unlabelled as older patches do.

Tensor legend: S rows, L stored layers, H hidden size.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from data_contracts.dump import HEADER_BYTES, RID_PREFIX, TEMPORARY_PREFIX, Acknowledgement, name_of
from data_contracts.identity import FinalNorm, StateDtype
from drafter_data.embedded.request import GenerateRequest
from drafter_data.embedded.rows import StateRows
from drafter_data.errors import UsageError

_ITEM_BYTES: dict[StateDtype, int] = {"F32": 4, "F16": 2, "BF16": 2}
_BUFFERS_PER_CALL = 1024  # IOV_MAX on Linux


@dataclass(frozen=True)
class DumpFormat:
    """What is the same for all dumps of a server."""

    folder: Path
    layers: tuple[int, ...]
    hidden_size: int
    dtype: StateDtype
    final_norm: FinalNorm


@dataclass(frozen=True)
class PassPiece:
    """What one request got out of one pass: its rows `start..end`."""

    request: GenerateRequest
    start: int
    end: int
    rows: StateRows


class DumpWriter(Protocol):
    """Leaves the dumps of one pass. A failed write is told in the acknowledgement (labelled) or on stderr; the server goes on."""

    def write(self, pieces: Sequence[PassPiece], *, extend: bool) -> None: ...


def prepare_folder(folder: Path) -> None:
    """Makes the dump folder with mode 0700. Raises UsageError when it exists and others may write to it or it is not ours."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise UsageError(f"dump folder {folder}: {error.strerror}; name a folder that can be made and is yours") from error
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(
            f"dump folder {folder}: expected ours alone (mode 0700), found owner {found.st_uid}, mode {found.st_mode & 0o7777:o}; "
            "name another folder or correct its owner and mode"
        )


class LabelledWriter:
    """One file an extend pass and request whose id starts with `RID_PREFIX`; others leave nothing."""

    def __init__(self, form: DumpFormat) -> None:
        self._form = form
        self._counter = 0

    def write(self, pieces: Sequence[PassPiece], *, extend: bool) -> None:
        """Writes each piece under a temporary name and renames it."""
        for piece in pieces:
            if extend and piece.request.rid.startswith(RID_PREFIX):
                error = self._write_piece(piece)
                piece.request.acknowledgement = Acknowledgement(start=piece.start, end=piece.end, error=error).model_dump()

    def _write_piece(self, piece: PassPiece) -> str:
        name = name_of(piece.request.rid, piece.start, piece.end)
        self._counter += 1
        temporary = self._form.folder / f"{TEMPORARY_PREFIX}{name}.{os.getpid()}.{self._counter}"
        try:
            write_new(
                temporary,
                [memoryview(self._header(piece)), piece.rows.token_ids_s.astype("<i8").data, *piece.rows.interleaved()],
            )
            temporary.rename(self._form.folder / name)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            print(f"dump {name}: {error.strerror}", file=sys.stderr, flush=True)  # noqa: T201
            return f"{type(error).__name__}: {error.strerror}"
        return ""

    def _header(self, piece: PassPiece) -> bytes:
        form, rows = self._form, len(piece.rows.token_ids_s)
        metadata = {
            "rid": piece.request.rid,
            "start": str(piece.start),
            "end": str(piece.end),
            "layers": ",".join(map(str, form.layers)),
            "final_norm": form.final_norm,
            "version": "1",
        }
        states_bytes = rows * len(form.layers) * form.hidden_size * _ITEM_BYTES[form.dtype]
        tensors = {
            "token_ids": _entry("I64", [rows], 0, rows * 8),
            "hidden_states": _entry(form.dtype, [rows, len(form.layers), form.hidden_size], rows * 8, states_bytes),
        }
        return header_bytes({"__metadata__": metadata, **tensors}, HEADER_BYTES)


class UnlabelledWriter:
    """One `req_<counter>/` a pass, decode steps included, written under its final name: a reader can see it half-written."""

    def __init__(self, form: DumpFormat) -> None:
        self._form = form
        self._counter = self._first_free(form.folder)

    @staticmethod
    def _first_free(folder: Path) -> int:
        """Counters start at 0; where an earlier server's dumps lie, behind them (the older patch overwrote)."""
        taken = [int(path.name[4:]) for path in folder.glob("req_*") if path.name[4:].isdigit()]
        return max(taken, default=-1) + 1

    def take_number(self) -> str:
        """The name of the next dump."""
        self._counter += 1
        return f"req_{self._counter - 1:08d}"

    def write(self, pieces: Sequence[PassPiece], *, extend: bool) -> None:
        """Writes one file a layer with the rows of all requests one after another, then `meta.json`."""
        del extend
        form, rows = self._form, sum(len(piece.rows.token_ids_s) for piece in pieces)
        folder = form.folder / self.take_number()
        size = rows * form.hidden_size * _ITEM_BYTES[form.dtype]
        header = header_bytes({"hidden_states": _entry(form.dtype, [rows, form.hidden_size], 0, size)})
        try:
            folder.mkdir(mode=0o700)
            for column, layer in enumerate(form.layers):
                buffers = [buffer for piece in pieces for buffer in piece.rows.of_layer(column)]
                write_new(folder / f"layer_{layer}.safetensors", [memoryview(header), *buffers])
            meta = json.dumps({"num_tokens": rows, "final_norm": form.final_norm}).encode()
            write_new(folder / "meta.json", [memoryview(meta)])
        except OSError as error:
            print(f"dump {folder.name}: {error.strerror}", file=sys.stderr, flush=True)  # noqa: T201


def header_bytes(header: dict[str, Any], total: int = 0) -> bytes:
    """A safetensors header padded with spaces to `total` bytes in all, or to the next multiple of 8."""
    text = json.dumps(header, separators=(",", ":")).encode()
    total = max(total, 8 + len(text) + -len(text) % 8)
    return (total - 8).to_bytes(8, "little") + text.ljust(total - 8)


def _entry(dtype: str, shape: list[int], start: int, size: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}


def write_new(path: Path, buffers: Iterable[memoryview]) -> None:
    """Writes a new file of mode 0600 from many buffers, without joining them. Raises OSError (exists, disk full)."""
    pending = [buffer.cast("B") for buffer in buffers]
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        first = 0
        while first < len(pending):
            written = os.writev(descriptor, pending[first : first + _BUFFERS_PER_CALL])
            while first < len(pending) and written >= len(pending[first]):
                written -= len(pending[first])
                first += 1
            if written:
                pending[first] = pending[first][written:]
    finally:
        os.close(descriptor)
