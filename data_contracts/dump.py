"""Labelled dumps: what the capture hook inside an engine writes and the client claims.

One file per extend pass and request: `name_of(rid, start, end)`, a safetensors file in the state form
(`hidden_states [rows, L, H]`, `token_ids [rows]` int64) whose rows are the prompt's `start..end`. The header is padded to
`HEADER_BYTES`, so that a file taken by rename can be given the canonical header of a state file in place.
`capture/sglang_hook.py` runs in the engine's own environment and repeats these constants; a test holds them equal.
"""

from __future__ import annotations

import hashlib

from data_contracts.record import Record

DUMP_VERSION = 1
RID_PREFIX = "dd-"
FILE_PREFIX = "dd1-"
TEMPORARY_PREFIX = ".tmp-"
HEADER_BYTES = 1024
"""Bytes before the first tensor byte: the 8-byte length and the JSON, padded with spaces."""
ACKNOWLEDGEMENT = "drafter_data"
"""Key in the reply's `meta_info` that carries a list with one `Acknowledgement` as a dict: the last pass's, which repeats the first
error of earlier pieces. SGLang keeps one value an output token, so the list is empty with `max_new_tokens` 0: ask for 1."""


def name_of(request_id: str, start: int, end: int) -> str:
    """File name of the rows `start..end` of a request. The id is hashed: it never becomes part of a path."""
    return f"{rid_prefix_of(request_id)}{start:08d}-{end:08d}.safetensors"


def rid_prefix_of(request_id: str) -> str:
    """What the names of all pieces of a request begin with."""
    return f"{FILE_PREFIX}{hashlib.blake2b(request_id.encode(), digest_size=20).hexdigest()}-"


class Acknowledgement(Record):
    """What the hook tells about one pass of one request. `error` is empty on success."""

    version: int = DUMP_VERSION
    start: int
    end: int
    error: str = ""
