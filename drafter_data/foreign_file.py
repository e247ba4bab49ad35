"""Safetensors files that somebody else may cut or write anew while we read them: read with pread(2), not mapped.

A process that reads a mapped page behind a file's new end is killed by SIGBUS, whatever it catches. Here such a read is short, and
that is an error like any other. Values are read in the order in which they are asked for, so a dump is never in memory as a whole
unless somebody wants it so.

Tensor legend: S tokens, L stored layers, H hidden size.
"""

from __future__ import annotations

import os
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drafter_data.errors import DumpRejected
from drafter_data.safetensors_file import NUMPY_DTYPES, MalformedFile, TensorEntry, parse_header

HEAD_BYTES = 1 << 14
"""Read at once: the header and, of most prompts, the token ids."""
WHOLE_BYTES = 1 << 20
"""Up to this size of a tensor single rows are not read one by one."""


class ForeignFile:
    """An open safetensors file of which only the beginning has been read. Owns its descriptor.

    With a `room` as much is read at once as goes into it; rows and heads that lie there are views of it, not to be written to and
    good until it is used again. It should begin at a page (files.py, `page_aligned`).

    Raises MalformedFile (the descriptor is then closed), also for a file larger than `most_bytes` of tensors and a header can be,
    or of another size than `exact_bytes`; such a file is not read.
    """

    def __init__(
        self,
        descriptor: int,
        name: str,
        max_header_bytes: int,
        most_bytes: int | None = None,
        *,
        exact_bytes: int | None = None,
        room: memoryview | None = None,
    ) -> None:
        self.descriptor = descriptor
        self.name = name
        try:
            size = os.fstat(descriptor).st_size
            if most_bytes is not None and size > most_bytes + max_header_bytes:
                raise MalformedFile(f"{name}: {size} bytes, expected at most {most_bytes} and a header")
            if exact_bytes is not None and size != exact_bytes:
                raise MalformedFile(f"{name}: {size} bytes, expected {exact_bytes}")
            self._head = os.pread(descriptor, HEAD_BYTES, 0) if room is None else room[: os.preadv(descriptor, [room], 0)]
            length = int.from_bytes(self._head[:8], "little")
            if len(self._head) < 8 or length > min(max_header_bytes, size - 8):
                raise MalformedFile(f"{name}: header claims {length} bytes in a file of {size}")
            self.header_bytes = 8 + length
            header = bytes(self._head[8 : 8 + length])
            if len(header) < length:
                header = os.pread(descriptor, length, 8)
            self.tensors, self.metadata = parse_header(header, size - self.header_bytes, name)
        except BaseException:
            os.close(descriptor)
            raise

    def rows(self, name: str) -> RowsOnDisk:
        """A tensor that is read when it is looked at. Raises MalformedFile when it is not there, or is a single number."""
        entry = self.tensors.get(name)
        if entry is None or not entry.shape:
            raise MalformedFile(f"{self.name}: no tensor {name!r} with rows, only {sorted(self.tensors)[:8]}")
        return RowsOnDisk(self, entry)

    def array(self, name: str) -> NDArray[Any]:
        """A tensor, read whole, in storage form (bfloat16 as uint16), with memory of its own."""
        rows, entry = self.rows(name), self.tensors[name]
        start, end = self.header_bytes + entry.start, self.header_bytes + entry.end
        if end > len(self._head):
            return rows[:]
        return np.frombuffer(bytearray(self._head[start:end]), rows.dtype).reshape(rows.shape)

    def head(self, name: str) -> bytes | memoryview:
        """All bytes before a tensor: the header and the tensors that lie there."""
        size = self.header_bytes + self.tensors[name].start
        return self._head[:size] if size <= len(self._head) else os.pread(self.descriptor, size, 0)

    def in_room(self, offset: int, size: int) -> memoryview | None:
        """Bytes of the data part, where they lie in the room; read-only."""
        start = self.header_bytes + offset
        if not isinstance(self._head, memoryview) or start + size > len(self._head):
            return None
        return self._head[start : start + size].toreadonly()

    def read_into(self, out: NDArray[Any], offset: int) -> None:
        """Fills `out` from a byte offset of the data part. Raises DumpRejected (`dump-malformed`) where the file ends before."""
        view, position = out.data.cast("B"), self.header_bytes + offset
        while view:
            count = os.preadv(self.descriptor, [view], position)
            if not count:
                raise DumpRejected(
                    f"dump {self.name}: expected {position + len(view)} bytes, found {os.fstat(self.descriptor).st_size}: it was "
                    "cut while it was read; the sample is extracted again",
                    reason="dump-malformed",
                )
            view, position = view[count:], position + count

    def close(self) -> None:
        """Closes the descriptor, once."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> ForeignFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RowsOnDisk:
    """A tensor of a `ForeignFile` with the part of an array's face that the checks use; what is indexed is read.

    Every read raises DumpRejected when the file has become too short for it.
    """

    def __init__(self, file: ForeignFile, entry: TensorEntry) -> None:
        self._file = file
        self._start = entry.start
        self.shape = entry.shape
        self.ndim = len(entry.shape)
        self.dtype = np.dtype(NUMPY_DTYPES[entry.dtype])
        self.nbytes = entry.end - entry.start
        self._row_bytes = self.dtype.itemsize * prod(entry.shape[1:])

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Rows start..stop, into `out` where it is given; else a view of the file's room, where they lie in it, or new memory."""
        shape, offset = (stop - start, *self.shape[1:]), self._start + start * self._row_bytes
        there = self._file.in_room(offset, shape[0] * self._row_bytes) if out is None else None
        if there is not None:
            return np.frombuffer(there, self.dtype).reshape(shape)
        found = np.empty(shape, self.dtype) if out is None else out[: stop - start]
        if found.nbytes:
            self._file.read_into(found, offset)
        return found

    def __getitem__(self, key: Any) -> NDArray[Any]:
        first, rest = (key[0], key[1:]) if isinstance(key, tuple) else (key, ())
        if isinstance(first, slice):
            start, stop, step = first.indices(len(self))
            found = self.read(start, max(start, stop))[::step] if step > 0 else self.read(0, len(self))[first]
        elif isinstance(first, int):
            row = range(len(self))[first]
            found = self.read(row, row + 1)[0]
        else:
            found = self._rows(np.asarray(first))
        return found[(slice(None), *rest) if not isinstance(first, int) else rest] if rest else found

    def _rows(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """Single rows. Of a small tensor all are read: a read a row would cost more."""
        if self.nbytes <= WHOLE_BYTES:
            return self.read(0, len(self))[numbers]
        found = np.empty((len(numbers), *self.shape[1:]), self.dtype)
        for place, row in enumerate(numbers.tolist()):
            self.read(row, row + 1, found[place : place + 1])
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)
