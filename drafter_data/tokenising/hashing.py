"""Hashes of tokenizer files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path


def hash_of_files(paths: Iterable[Path]) -> str:
    """blake2b-160 hex over the names and bytes of the files that are there."""
    digest = hashlib.blake2b(digest_size=20)
    for path in sorted(set(paths)):
        if path.is_file():
            data = path.read_bytes()
            digest.update(f"{path.name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()
