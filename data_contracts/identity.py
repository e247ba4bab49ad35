"""Content identities: which states, which row, which dataset, which store.

Identity is content, never a file name, a row number or a count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Literal

from data_contracts.record import Record

CONTRACT_VERSION = 1
KEY_HEX_DIGITS = 40  # blake2b-160

FinalNorm = Literal["pre", "post"]
"""Whether the last column of `hidden_states` is the input (`pre`) or the output (`post`) of the model's final norm."""

StateDtype = Literal["F32", "F16", "BF16"]
"""The safetensors name of the states' dtype."""


def state_key(token_ids: Sequence[int]) -> str:
    """Names the states of a prompt: blake2b-160 hex of `b"ids1"` + the ids as little-endian uint32.

    Raises OverflowError for an id outside 0..2^32-1.
    """
    return state_key_of_bytes(b"".join(int(i).to_bytes(4, "little") for i in token_ids))


def state_key_of_bytes(ids_le_uint32: bytes | memoryview) -> str:
    """`state_key` for ids that are already little-endian uint32 bytes (a NumPy array's buffer)."""
    digest = hashlib.blake2b(b"ids1", digest_size=20)
    digest.update(ids_le_uint32)
    return digest.hexdigest()


def sample_key(of_state: str, mask: bytes) -> str:
    """Names a dataset row: blake2b-160 hex of the state key's 20 bytes + one mask byte (0 or 1) a token."""
    return hashlib.blake2b(bytes.fromhex(of_state) + mask, digest_size=20).hexdigest()


def dataset_id(sample_keys: Iterable[str]) -> str:
    """Names a dataset version: blake2b-160 hex over the contract version and the sorted sample keys."""
    digest = new_dataset_digest()
    for key in sorted(sample_keys):
        digest.update(bytes.fromhex(key))
    return digest.hexdigest()


def new_dataset_digest() -> hashlib.blake2b:
    """The hash that `dataset_id` feeds with the sample keys' bytes in ascending order, for keys that do not fit in memory."""
    return hashlib.blake2b(f"dataset{CONTRACT_VERSION}".encode(), digest_size=20)


def chunk_key(state_keys: Iterable[str]) -> str:
    """Names a chunk by the states it is to bring: blake2b-160 hex over the sorted state keys."""
    digest = hashlib.blake2b(b"chunk1", digest_size=20)
    for key in sorted(state_keys):
        digest.update(bytes.fromhex(key))
    return digest.hexdigest()


class StoreIdentity(Record):
    """What must agree for two states to be the same thing. Another identity is refused, never mixed in.

    `layers` are Hugging Face indices of `hidden_states` (0 = embeddings, num_layers = final), ascending, the final one last.
    """

    weights_digest: str
    quantisation: str | None = None
    num_layers: int
    hidden_size: int
    layers: tuple[int, ...]
    final_norm: FinalNorm = "pre"
    dtype: StateDtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's states and id in a state file: layers x hidden size x width of the dtype + 8."""
        return len(self.layers) * self.hidden_size * (4 if self.dtype == "F32" else 2) + 8

    def differences(self, other: StoreIdentity) -> list[str]:
        """One `field: mine != theirs` line for each field that differs."""
        mine, theirs = self.model_dump(), other.model_dump()
        return [f"{name}: {mine[name]} != {theirs[name]}" for name in mine if mine[name] != theirs[name]]


class Provenance(Record):
    """How states came about. Recorded, and warned about on change, but no part of the identity."""

    engine: str
    engine_version: str
    model: str
    host: str = ""
    tensor_parallel: int = 1
    flags: dict[str, str] = {}
    code_version: str = ""
