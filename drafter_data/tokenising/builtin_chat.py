"""Conversations to ids and loss mask with the shipped tokenizer: its chat template, written out in Python.

Equal to transformers' `apply_chat_template` on the shipped folder (ids and generation mask; a test holds them equal), with
one difference on purpose: a control token that a turn's text spells stays text.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drafter_data.runs.conversations import Conversation, Turn
from drafter_data.tokenising.builtin import IM_END, IM_START, BuiltinTokenizer

_HEADER = "assistant\n"


def encode_conversation(tokenizer: BuiltinTokenizer, conversation: Conversation) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """`input_ids_s` int32 [S] and `loss_mask_s` uint8 [S]: 1 from the assistant's first token to its end-of-turn token."""
    ids: list[int] = []
    mask = bytearray()
    newline = tokenizer.encode("\n")
    tools = [f"tools\n{_json(list(conversation.tools))}"] if conversation.tools else []
    for text in (*tools, *conversation.turns):
        if isinstance(text, str) or text.role != "assistant":
            body = tokenizer.encode(text if isinstance(text, str) else f"{text.role}\n{text.content}")
            supervised = len(body)
        else:
            body = tokenizer.encode(_HEADER + answer_text(text))
            supervised = _tokens_before(tokenizer, body, len(_HEADER))
        ids += [IM_START, *body, IM_END, *newline]
        answered = len(body) - supervised
        is_answer = not isinstance(text, str) and text.role == "assistant"
        mask += bytes(1 + supervised) + b"\1" * answered + bytes([is_answer]) + bytes(len(newline))
    return np.array(ids, dtype=np.int32), np.frombuffer(bytes(mask), dtype=np.uint8)


def answer_text(turn: Turn) -> str:
    """What the assistant wrote in one turn: reasoning, content, calls."""
    thought = f"<think>\n{turn.reasoning}\n</think>\n" if turn.reasoning else ""
    calls = "".join(f"\n<tool_call>\n{_json(call['function'])}\n</tool_call>" for call in turn.tool_calls)
    return thought + turn.content + calls


def _tokens_before(tokenizer: BuiltinTokenizer, ids: list[int], header_bytes: int) -> int:
    """Tokens that end within the first `header_bytes` bytes; one that straddles the border counts as the answer's."""
    end = 0
    for position, token in enumerate(ids):
        end += len(tokenizer.token_bytes[token])
        if end > header_bytes:
            return position
    return len(ids)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
