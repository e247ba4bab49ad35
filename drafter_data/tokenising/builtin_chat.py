"""Conversations to ids and loss mask with the shipped tokenizer: its chat template, written out in Python.

Equal to transformers' `apply_chat_template` on the shipped folder (ids and generation mask; a test holds them equal), with
one difference on purpose: a control token that a turn's text spells stays text.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from drafter_data.runs.conversations import Conversation, Turn
from drafter_data.runs.options import TokenizeOptions
from drafter_data.tokenising.builtin import FOLDER, IM_END, IM_START, BuiltinTokenizer
from drafter_data.tokenising.hashing import hash_of_files

_HEADER: Final = "assistant\n"


class BuiltinChat:
    """The shipped tokenizer with its template."""

    def __init__(self, options: TokenizeOptions) -> None:
        self.name = "builtin"
        self.tokenizer_hash = hash_of_files([FOLDER / "tokenizer.json"])
        self.template_hash = hash_of_files([FOLDER / "chat_template.jinja"])
        self._options = options
        self._tokenizer = _shared_tokenizer()
        self._newline = self._tokenizer.encode("\n")
        self._token_bytes = np.array([len(token) for token in self._tokenizer.token_bytes])

    def encode(self, conversation: Conversation) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """`input_ids_s` int32 [S] and `loss_mask_s` uint8 [S]: 1 from an answer's first token to its end-of-turn token."""
        ids: list[int] = []
        supervised: list[tuple[int, int]] = []
        if conversation.tools:
            ids += self._turn(f"tools\n{_json(list(conversation.tools))}")
        for turn in conversation.turns:
            start = len(ids) + 1
            if turn.role == "assistant":
                parts = _parts(turn)
                ids += self._turn(_HEADER + "".join(parts))
                supervised.append(self._answer(turn, parts, ids, start))
            else:
                ids += self._turn(f"{turn.role}\n{turn.content}")
        mask_s = np.zeros(len(ids), dtype=np.uint8)
        for first, end in supervised[-1:] if self._options.last_turn_only else supervised:
            mask_s[first:end] = 1
        return np.array(ids, dtype=np.int32), mask_s

    def _turn(self, text: str) -> list[int]:
        return [IM_START, *self._tokenizer.encode(text), IM_END, *self._newline]

    def _answer(self, turn: Turn, parts: tuple[str, str, str], ids: list[int], start: int) -> tuple[int, int]:
        """The supervised tokens of the answer whose header begins at token `start`. A token over a border is inside."""
        end = len(ids) - len(self._newline)
        ends_in_bytes = np.cumsum(self._token_bytes[ids[start : end - 1]])
        thought, content = len(parts[0].encode()), len(parts[1].encode())
        first_byte = len(_HEADER) + (0 if self._options.supervise_reasoning else thought)
        first = start + int(np.searchsorted(ends_in_bytes, first_byte, side="right"))
        if self._options.supervise_tool_calls or not turn.tool_calls:
            return first, end
        last_byte = len(_HEADER) + thought + content
        return first, start + int(np.searchsorted(ends_in_bytes, last_byte, side="left")) + (last_byte > first_byte)


@cache
def _shared_tokenizer() -> BuiltinTokenizer:
    return BuiltinTokenizer()


def _parts(turn: Turn) -> tuple[str, str, str]:
    """What the assistant wrote in one turn: reasoning, content, calls."""
    thought = f"<think>\n{turn.reasoning}\n</think>\n" if turn.reasoning else ""
    calls = "".join(f"\n<tool_call>\n{_json(call['function'])}\n</tool_call>" for call in turn.tool_calls)
    return thought, turn.content, calls


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
