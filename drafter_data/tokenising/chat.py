"""Loading the tokenizer that turns conversations into ids and mask."""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from drafter_data.runs.conversations import Conversation
from drafter_data.runs.options import TokenizeOptions
from drafter_data.tokenising.builtin_chat import BuiltinChat
from drafter_data.tokenising.huggingface import HuggingFaceChat

BUILTIN: Final = "builtin"


class ChatTokenizer(Protocol):
    """A tokenizer with its chat template. Hashes are blake2b-160 hex over the folder's tokenizer files and the template."""

    name: str
    tokenizer_hash: str
    template_hash: str

    def encode(self, conversation: Conversation) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Ids int32 [S] and mask uint8 [S]. Raises RowDropped where the template or the mask refuses."""
        ...


def load_chat_tokenizer(options: TokenizeOptions) -> ChatTokenizer:
    """The tokenizer named in the options. Raises InputError for a folder that is none, or needs code of its own."""
    if options.tokenizer == BUILTIN:
        return BuiltinChat(options)
    return HuggingFaceChat(options)
