"""Loading the tokenizer that turns conversations into ids and mask."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from drafter_data.runs.conversations import Conversation
from drafter_data.runs.options import TokenizeOptions
from drafter_data.tokenising import builtin_chat
from drafter_data.tokenising.builtin import FOLDER, BuiltinTokenizer


class ChatTokenizer(Protocol):
    """A tokenizer with its chat template. Hashes are blake2b-160 hex over the folder's tokenizer files and the template."""

    name: str
    tokenizer_hash: str
    template_hash: str

    def encode(self, conversation: Conversation) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Ids int32 [S] and mask uint8 [S]. Raises RowDropped where the template or the mask refuses."""
        ...


def load_chat_tokenizer(options: TokenizeOptions) -> ChatTokenizer:
    """The tokenizer named in the options. Raises InputError for a folder that is none."""
    return BuiltinChat(options)


class BuiltinChat:
    """The shipped tokenizer and template."""

    def __init__(self, options: TokenizeOptions) -> None:
        self.name = "builtin"
        self.tokenizer_hash = hash_of_files([FOLDER / "tokenizer.json"])
        self.template_hash = hash_of_files([FOLDER / "chat_template.jinja"])
        self._options = options
        self._tokenizer = BuiltinTokenizer()

    def encode(self, conversation: Conversation) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Ids int32 [S] and mask uint8 [S]."""
        return builtin_chat.encode_conversation(self._tokenizer, conversation)


def hash_of_files(paths: list[Path]) -> str:
    """blake2b-160 hex over the bytes of the files that are there, each with its name."""
    digest = hashlib.blake2b(digest_size=20)
    for path in sorted(paths):
        if path.is_file():
            data = path.read_bytes()
            digest.update(f"{path.name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()
