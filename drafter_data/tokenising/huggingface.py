"""Any local Hugging Face tokenizer folder with its chat template (extra `tokenize`).

The conversation is rendered once and encoded once, as an engine does it, so that the ids are the engine's. The mask comes
from the template's generation marks where it has them (equal to transformers' `return_assistant_tokens_mask`), else from
exact rendering turn by turn (spans.py).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from drafter_data.errors import InputError
from drafter_data.runs import reasons
from drafter_data.runs.conversations import Conversation, Turn
from drafter_data.runs.options import TokenizeOptions
from drafter_data.runs.reasons import RowDropped
from drafter_data.tokenising.hashing import hash_of_files
from drafter_data.tokenising.spans import Message, Render, Span, answer_spans, common_prefix, content_place
from drafter_data.tokenising.template import REFUSALS, ChatTemplate

_TOKENIZER_FILES: Final = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "token*.py",
)


@dataclass(slots=True)
class _Encoded:
    """Token ids, and the first token that holds a character; for a tokenizer without offsets, found by encoding prefixes."""

    ids: list[int]
    token_at: Any


class HuggingFaceChat:
    """One tokenizer folder."""

    def __init__(self, options: TokenizeOptions) -> None:
        folder = Path(options.tokenizer)
        if not folder.is_dir():
            raise InputError(
                f"{options.tokenizer}: no such tokenizer folder; expected `builtin` or a local folder with tokenizer.json",
                reason="tokenizer-missing",
            )
        self.name = str(folder)
        self._options = options
        self._tokenizer: Any = _load(folder, options.trust_remote_code)
        self._backend: Any = getattr(self._tokenizer, "backend_tokenizer", None) if self._tokenizer.is_fast else None
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        self.tokenizer_hash = hash_of_files([path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)])
        self._specials = sorted(_special_tokens(self._tokenizer), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, self._specials))) if self._specials else None
        self._templates = _templates(self._tokenizer, options)
        self.template_hash = (
            hashlib.blake2b(
                json.dumps({name: template.source for name, template in sorted(self._templates.items())}).encode(), digest_size=20
            ).hexdigest()
            if self._templates
            else ""
        )

    def encode(self, conversation: Conversation) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Ids int32 [S] and mask uint8 [S]. Raises RowDropped where the template refuses or the mask cannot be exact."""
        template = self._template_for(conversation)
        self._check_special(conversation)
        tools = list(conversation.tools) or None
        messages = [self._message(turn, template) for turn in conversation.turns]

        def render(part: Sequence[Message], prompt: bool) -> str:
            return template.render(part, tools, prompt=prompt)

        text, spans = template.render_with_marks(messages, tools)
        if not template.has_generation_marks:
            spans = answer_spans(messages, text, render, self._specials)
        spans = self._supervised(conversation, messages, text, spans, render)
        encoded = self._encode_text(text)
        mask_s = np.zeros(len(encoded.ids), dtype=np.uint8)
        for start, end in spans:
            first, last = encoded.token_at(start), encoded.token_at(end - 1)
            if first is not None and end > start:
                mask_s[first : last + 1 if last else None] = 1
        return np.array(encoded.ids, dtype=np.int32), mask_s

    def _template_for(self, conversation: Conversation) -> ChatTemplate | _OwnTemplate:
        if not self._templates:
            raise InputError(
                f"{self.name}: has no chat template, which conversations need; add chat_template.jinja, or give tokenised rows",
                reason="template-missing",
            )
        if conversation.tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates.get("default") or next(iter(self._templates.values()))

    def _message(self, turn: Turn, template: ChatTemplate | _OwnTemplate) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": turn.role,
            "content": turn.content,
            **{k: v for k, v in turn.extras.items() if k[:2] != "__"},
        }
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
            for key in ("reasoning", "thinking"):
                if re.search(rf"\b{key}\b", template.source):
                    message[key] = turn.reasoning
        if turn.tool_calls:
            message["tool_calls"] = list(turn.tool_calls)
        return message

    def _check_special(self, conversation: Conversation) -> None:
        if self._special is None or self._options.special_text == "keep":
            return
        for index, turn in enumerate(conversation.turns):
            found = self._special.search(turn.content) or self._special.search(turn.reasoning)
            if found is None and turn.tool_calls:
                found = self._special.search(json.dumps(turn.tool_calls, ensure_ascii=False))
            if found is not None:
                raise RowDropped(reasons.SPECIAL_IN_TEXT, f"turn {index} spells the control token {found.group()!r}")

    def _supervised(
        self, conversation: Conversation, messages: Sequence[Message], text: str, spans: list[Span], render: Render
    ) -> list[Span]:
        """The spans that count, after the options: reasoning and calls in or out, the last answer only."""
        options = self._options
        answers = [index for index, turn in enumerate(conversation.turns) if turn.role == "assistant"]
        if options.last_turn_only:
            begins = common_prefix(render(messages[: answers[-1]], False), text)
            spans, answers = [span for span in spans if span[0] >= begins], answers[-1:]
        if options.supervise_reasoning and options.supervise_tool_calls:
            return spans
        if len(spans) != len(answers):
            raise RowDropped(reasons.MASK_DRIFT, f"{len(spans)} generation blocks for {len(answers)} answers")
        narrowed: list[Span] = []
        for index, (start, end) in zip(answers, spans, strict=True):
            turn = conversation.turns[index]
            without_reasoning = not options.supervise_reasoning and bool(turn.reasoning)
            without_calls = not options.supervise_tool_calls and bool(turn.tool_calls)
            if without_reasoning or without_calls:
                place = content_place(messages, index, text, (start, end), render)
                start, end = place[0] if without_reasoning else start, place[1] if without_calls else end  # noqa: PLW2901
            narrowed.append((start, end))
        return narrowed

    def _encode_text(self, text: str) -> _Encoded:
        if self._backend is not None:
            encoding = self._backend.encode(text, add_special_tokens=False)
            return _Encoded(encoding.ids, encoding.char_to_token)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return _Encoded(ids, partial(self._token_by_prefix, text, ids))

    def _token_by_prefix(self, text: str, ids: list[int], place: int) -> int:
        """The token that holds the character at `place`, for a tokenizer that keeps no offsets: exact, or the row is dropped."""
        before: list[int] = self._tokenizer.encode(text[:place], add_special_tokens=False)
        through: list[int] = self._tokenizer.encode(text[: place + 1], add_special_tokens=False)
        if ids[: len(before)] == before:
            return len(before)
        if ids[: len(through)] == through:
            return len(through) - 1
        raise RowDropped(reasons.MASK_DRIFT, f"no token border at character {place} of the rendered text")


def _load(folder: Path, trust_remote_code: bool) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise InputError(
            f"{folder}: a Hugging Face tokenizer needs transformers; install it with `pip install drafter-data[tokenize]`",
            reason="extra-missing",
        ) from error
    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if "trust_remote_code" in str(error):
            raise InputError(
                f"{folder}: this tokenizer is code of its own, which is not run unless asked for: read it, then pass "
                "`--trust-remote-code`",
                reason="remote-code-refused",
            ) from error
        raise InputError(f"{folder}: cannot be loaded as a tokenizer: {line}", reason="tokenizer-invalid") from error


def _templates(tokenizer: Any, options: TokenizeOptions) -> dict[str, ChatTemplate | _OwnTemplate]:
    source = tokenizer.chat_template
    if not source:
        return {}
    if _renders_itself(tokenizer):
        return {"default": _OwnTemplate(tokenizer, source)}
    named = {"default": source} if isinstance(source, str) else dict(source)
    variables = {**tokenizer.special_tokens_map}
    return {name: ChatTemplate(text, variables, options.template_time) for name, text in named.items()}


def _renders_itself(tokenizer: Any) -> bool:
    from transformers import PreTrainedTokenizerBase

    return getattr(type(tokenizer), "apply_chat_template", None) is not PreTrainedTokenizerBase.apply_chat_template


class _OwnTemplate:
    """The template of a tokenizer whose code renders it in its own way; that way is followed, without generation marks."""

    has_generation_marks = False

    def __init__(self, tokenizer: Any, source: Any) -> None:
        self._tokenizer = tokenizer
        self.source = source if isinstance(source, str) else json.dumps(source, sort_keys=True)

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, prompt: bool = False) -> str:
        """The text of the messages."""
        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tools=tools, tokenize=False, add_generation_prompt=prompt
            )
        except REFUSALS as error:
            raise RowDropped(reasons.TEMPLATE_REFUSED, f"the chat template refused: {error}") from error

    def render_with_marks(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, *, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """The text of the messages, and no marks."""
        return self.render(messages, tools, prompt=prompt), []


def _special_tokens(tokenizer: Any) -> set[str]:
    """The control tokens: those that the tokenizer's files mark as special."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return {name for name in added | set(tokenizer.all_special_tokens) if name}
