"""The safetensors format, read strictly and mapped, and written with a header of a chosen size.

Why not the safetensors package: its NumPy side cannot read bfloat16 (safetensors#598) and saves strided arrays wrongly
(safetensors#825), it reads by path, while dump folders are read relative to a descriptor, and it takes a header's word. The format
(https://huggingface.co/docs/safetensors): 8 bytes little-endian header length N, N bytes of JSON, tensor bytes without gaps.
"""

from __future__ import annotations

import mmap
import os
import sys
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import ArrayLike, NDArray

from drafter_data.errors import DrafterDataError

MAX_HEADER_BYTES = 64 << 20
MOST_AXES = 64
"""Of a NumPy array, whose sizes, but for those that are 0, must besides multiply to what an index can hold."""
NUMPY_DTYPES: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I64": np.int64, "I32": np.int32, "I16": np.int16,
    "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_, "F8_E4M3": np.uint8, "F8_E5M2": np.uint8, "U16": np.uint16, "U32": np.uint32,
    "U64": np.uint64,
}  # fmt: skip
"""safetensors name to NumPy dtype; those that NumPy lacks are held as bit patterns."""
_WIDTHS = {name: np.dtype(dtype).itemsize for name, dtype in NUMPY_DTYPES.items()}


class MalformedFile(DrafterDataError):
    """The bytes are no safetensors file."""

    reason = "safetensors-malformed"


class TensorEntry(NamedTuple):
    """Where a tensor lies: byte offsets from the start of the data part."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class TensorFile:
    """An open, mapped safetensors file. Arrays are views of the map: keep the file open while they are used."""

    def __init__(self, buffer: mmap.mmap, name: str, max_header_bytes: int) -> None:
        self.name = name
        self._buffer = buffer
        self.header_bytes, self.header_json = _read_header(buffer, name, max_header_bytes)
        self.tensors, self.metadata = parse_header(self.header_json, len(buffer) - self.header_bytes, name)

    @classmethod
    def open(cls, path: Path, max_header_bytes: int = MAX_HEADER_BYTES) -> TensorFile:
        """Opens by path. Raises MalformedFile, or OSError when it cannot be opened."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return cls.of_descriptor(descriptor, str(path), max_header_bytes)
        finally:
            os.close(descriptor)

    @classmethod
    def of_descriptor(cls, descriptor: int, name: str, max_header_bytes: int = MAX_HEADER_BYTES) -> TensorFile:
        """Maps an open descriptor (which may be closed afterwards). Raises MalformedFile."""
        size = os.fstat(descriptor).st_size
        if size < 8:
            raise MalformedFile(f"{name}: {size} bytes, too short for a safetensors file")
        return cls(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ), name, max_header_bytes)

    def array(self, name: str) -> NDArray[Any]:
        """A read-only view of a tensor in storage form (bfloat16 as uint16). Raises MalformedFile when it is not there."""
        entry = self.tensors.get(name)
        if entry is None:
            raise MalformedFile(f"{self.name}: no tensor {name!r}, only {sorted(self.tensors)[:8]}")
        dtype = np.dtype(NUMPY_DTYPES[entry.dtype])
        flat = np.frombuffer(self._buffer, dtype, count=prod(entry.shape), offset=self.header_bytes + entry.start)
        return flat.reshape(entry.shape)

    def close(self) -> None:
        """Unmaps the file; while a view is alive the map stays until the view goes."""
        with suppress(BufferError):  # a live view holds the map: it is unmapped with it
            self._buffer.close()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_header(buffer: mmap.mmap, name: str, max_header_bytes: int) -> tuple[int, bytes]:
    length = int.from_bytes(buffer[:8], "little")
    if length > max_header_bytes or length > len(buffer) - 8:
        raise MalformedFile(f"{name}: header claims {length} bytes in a file of {len(buffer)}")
    return 8 + length, buffer[8 : 8 + length]


def parse_header(header_json: bytes, data_bytes: int, name: str) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Tensors and metadata of a header whose tensors must fill `data_bytes` without a gap. Raises MalformedFile."""
    try:
        header: dict[str, Any] = orjson.loads(header_json)
        metadata = {str(k): str(v) for k, v in header.pop("__metadata__", {}).items()}
        tensors = {
            key: TensorEntry(str(value["dtype"]), tuple(map(int, value["shape"])), *map(int, value["data_offsets"]))
            for key, value in header.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise MalformedFile(f"{name}: header is not a safetensors header ({type(error).__name__})") from error
    position = 0
    for key, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        width = _WIDTHS.get(entry.dtype, 0)
        if (
            not width
            or len(entry.shape) > MOST_AXES
            or min(entry.shape, default=0) < 0
            or width * prod(size for size in entry.shape if size) > sys.maxsize
            or entry.start != position
            or entry.end - entry.start != width * prod(entry.shape)
        ):
            raise MalformedFile(
                f"{name}: tensor {key!r} has dtype {entry.dtype}, shape {entry.shape} and bytes {entry.start}..{entry.end}"
            )
        position = entry.end
    if position != data_bytes:
        raise MalformedFile(f"{name}: expected {position} bytes of tensors, found {data_bytes}")
    return tensors, metadata


def state_header(shape_slh: tuple[int, int, int], dtype: str, header_bytes: int | None = None) -> bytes:
    """The canonical header of a state file: token ids, then states; no metadata, padded with spaces to `header_bytes` in all.

    Two writers of the same states give the same bytes. Raises ValueError when it does not fit.
    """
    tokens = shape_slh[0]
    ids_bytes = tokens * 8
    states_bytes = prod(shape_slh) * _WIDTHS[dtype]
    header = {
        "token_ids": {"dtype": "I64", "shape": [tokens], "data_offsets": [0, ids_bytes]},
        "hidden_states": {
            "dtype": dtype,
            "shape": list(shape_slh),
            "data_offsets": [ids_bytes, ids_bytes + states_bytes],
        },
    }
    text = orjson.dumps(header)
    total = header_bytes if header_bytes is not None else 8 + len(text) + (-len(text)) % 8
    if total < 8 + len(text):
        raise ValueError(f"a header of {8 + len(text)} bytes does not fit into {total}")
    return (total - 8).to_bytes(8, "little") + text.ljust(total - 8)


def decode_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bfloat16 bit patterns to float32: the upper half of the float's bits."""
    wide = bits.astype(np.uint32)
    return np.left_shift(wide, 16, out=wide).view(np.float32)


def as_float32(states: ArrayLike, dtype: str) -> NDArray[np.float32]:
    """States in storage form as float32."""
    stored: NDArray[Any] = np.asarray(states)
    return decode_bf16(stored) if dtype == "BF16" else stored.astype(np.float32)
