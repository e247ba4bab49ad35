"""Spoils dumps on their way to the dump folder, as `faults.py` says.

A dump that is hit is written by a writer of the same kind into a folder of its own first; what arrives in the dump folder, and
when, is then the fault's affair. Tensor legend: S rows, L stored layers, H hidden size.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from data_contracts.dump import name_of
from drafter_data.embedded.backend import Backend, LlamaBackend
from drafter_data.embedded.dumps import DumpFormat, DumpWriter, LabelledWriter, PassPiece, UnlabelledWriter
from drafter_data.embedded.faults import CONTENT_FAULTS, FILE_FAULTS, Fault, Faults
from drafter_data.embedded.request import GenerateRequest
from drafter_data.embedded.rows import ArrayRows
from drafter_data.errors import UsageError

_BF16_BITS = {"nan": 0x7FC0, "inf": 0x7F80}
TRAILING = b"trailing bytes! "
Files = dict[str, bytes]
"""Relative name to content, in the order in which they are written."""


class FaultyWriter:
    """A `DumpWriter` around another one."""

    def __init__(self, inner: LabelledWriter | UnlabelledWriter, form: DumpFormat, backend: Backend, faults: Faults) -> None:
        if not isinstance(backend, LlamaBackend):
            raise UsageError("faults need a real model: leave out --timed")
        self._inner = inner
        self._form = form
        self._backend = backend
        self._faults = faults

    def write(self, pieces: Sequence[PassPiece], *, extend: bool) -> None:
        """Writes what is not hit as ever, and the rest as its faults say. One hit request spoils an unlabelled pass as a whole."""
        if isinstance(self._inner, UnlabelledWriter):
            hit = [fault for piece in pieces for fault in self._of(piece)] if extend else []
            self._write(pieces, hit, extend=extend)
            return
        for piece in pieces:
            self._write([piece], self._of(piece) if extend else [], extend=extend)

    def _of(self, piece: PassPiece) -> list[Fault]:
        known = (*CONTENT_FAULTS, *FILE_FAULTS)
        return [fault for fault in self._faults.of(piece.request.rid) if fault.name in known]

    def _write(self, pieces: Sequence[PassPiece], hit: list[Fault], *, extend: bool) -> None:
        if not hit:
            self._inner.write(pieces, extend=extend)
            return
        whole = list(pieces)
        for fault in hit:
            if fault.name in CONTENT_FAULTS:
                pieces = [self._spoilt(piece, fault) for piece in pieces]
        files = self._staged(pieces)
        arrival = next((fault for fault in hit if fault.name in FILE_FAULTS), None)
        first = self._staged([self._shortened(piece) for piece in whole]) if arrival and arrival.name == "versions" else {}
        if isinstance(self._inner, LabelledWriter):
            names = [name_of(piece.request.rid, piece.start, piece.end) for piece in pieces]
            files, first = dict(zip(names, files.values(), strict=True)), dict(zip(names, first.values(), strict=False))
        else:
            number = self._inner.take_number()
            files, first = ({f"{number}/{Path(name).name}": data for name, data in part.items()} for part in (files, first))
        self._deliver(files, first, arrival)

    def _staged(self, pieces: Sequence[PassPiece]) -> Files:
        """What a writer of the same kind leaves for these pieces."""
        folder = Path(tempfile.mkdtemp(prefix="dd-fault-"))
        try:
            writer: DumpWriter = type(self._inner)(replace(self._form, folder=folder))
            writer.write(pieces, extend=True)
            found = [path for path in folder.rglob("*") if path.is_file()]
            found.sort(key=lambda path: (path.name == "meta.json", path.stat().st_mtime_ns, path.name))
            return {str(path.relative_to(folder)): path.read_bytes() for path in found}
        finally:
            shutil.rmtree(folder)

    def _spoilt(self, piece: PassPiece, fault: Fault) -> PassPiece:
        rows = cast("ArrayRows", piece.rows)
        states_slh, ids_s = np.array(rows.states_slh), rows.token_ids_s
        name, tokens = fault.name, len(ids_s)
        middle = tokens // 2
        if name in ("nan", "inf"):
            states_slh[middle, 1, 0] = _BF16_BITS[name] if states_slh.dtype == np.uint16 else float(name)
        elif name == "zeros":
            states_slh[:] = 0
        elif name == "zero-row":
            states_slh[middle, 1] = 0
        elif name == "duplicate-layer":
            states_slh[:, 1] = states_slh[:, 0]
        elif name == "transposed":
            states_slh = np.ascontiguousarray(states_slh.transpose(1, 0, 2)).reshape(states_slh.shape)
        elif name in ("swapped", "shifted-layer", "wrong-norm"):
            states_slh = self._recomputed(piece.request, name)[piece.start : piece.end]
        elif name == "prefix-hit":  # named for what it is: the rows behind the cached ones
            cached = tokens // 2
            return replace(piece, start=piece.start + cached, rows=ArrayRows(ids_s[cached:], states_slh[cached:]))
        else:  # rows-missing: the label names the whole range
            return self._shortened(piece)
        return replace(piece, rows=ArrayRows(ids_s, states_slh))

    def _recomputed(self, request: GenerateRequest, name: str) -> NDArray[Any]:
        ids_s, layers = request.token_ids_s, self._form.layers
        if name == "swapped":
            ids_s = np.ascontiguousarray(np.roll(ids_s[::-1], 1))
        if name == "shifted-layer":
            layers = (*(layer + 1 for layer in layers[:-1]), layers[-1])
        return self._backend.states(ids_s, layers, normed=name == "wrong-norm")

    def _shortened(self, piece: PassPiece) -> PassPiece:
        rows = cast("ArrayRows", piece.rows)
        half = max(1, len(rows.token_ids_s) // 2)
        return replace(piece, rows=ArrayRows(rows.token_ids_s[:half], rows.states_slh[:half]))

    def _deliver(self, files: Files, first: Files, fault: Fault | None) -> None:
        """Brings staged files into the dump folder in the way that the fault says."""
        if fault is None:
            self._put(files)
        elif fault.name in ("cut", "trailing"):
            spoilt = next(iter(files))
            data = files[spoilt][:-64] if fault.name == "cut" else files[spoilt] + TRAILING
            self._put(files | {spoilt: data})
        elif fault.name == "stale-lock":
            lock = next(iter(files)) + ".lock"
            self._put({lock: json.dumps({"pid": 1}).encode()} | files)
        elif fault.name == "unfinished":
            self._put({name: data[: len(data) // 2] for name, data in files.items() if not name.endswith("meta.json")})
        elif fault.name != "dropped":
            threading.Thread(target=self._arrive_slowly, args=(files, first, fault), daemon=True).start()

    def _arrive_slowly(self, files: Files, first: Files, fault: Fault) -> None:
        if fault.name == "growing":
            for name, data in files.items():
                path = self._path(name)
                with path.open("wb", buffering=0) as handle:
                    for start in range(0, len(data), max(1, len(data) // 3 + 1)):
                        handle.write(data[start : start + len(data) // 3 + 1])
                        time.sleep(fault.seconds / 3 / len(files))
            return
        if fault.name == "versions":
            self._put(first)
        time.sleep(fault.seconds)
        self._put(files)

    def _put(self, files: Files) -> None:
        for name, data in files.items():
            path = self._path(name)
            temporary = path.with_name(f".tmp-{path.name}")
            temporary.write_bytes(data)
            temporary.replace(path)

    def _path(self, name: str) -> Path:
        path = self._form.folder / name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        return path
