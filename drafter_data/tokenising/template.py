"""Chat templates: Jinja as Hugging Face templates expect it, with the places that the template itself marks as generated.

The environment is the one that transformers documents for chat templates: an immutable sandbox, `trim_blocks` and
`lstrip_blocks`, loop controls, a `tojson` that keeps Unicode and key order, `raise_exception`, `strftime_now` and the
`{% generation %}` block. A test holds the results equal to transformers'.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from drafter_data.errors import InputError
from drafter_data.runs import reasons
from drafter_data.runs.reasons import RowDropped

_MARKS: Final = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_NONCE: Final = secrets.token_hex(8)
_OPEN: Final = f"\ue000{_NONCE}+\ue001"
_CLOSE: Final = f"\ue000{_NONCE}-\ue001"
"""Put around what a generation block wrote and taken out again after rendering; no text can know them."""
REFUSALS: Final = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class _GenerationBlock(Extension):
    """`{% generation %} … {% endgeneration %}`: what the model itself writes."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Puts marks around the block's output."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


class ChatTemplate:
    """A compiled template. `variables` are the tokenizer's special tokens (`bos_token`, `eos_token`, ...)."""

    def __init__(self, source: str, variables: Mapping[str, Any], now: datetime | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, loopcontrols],  # autoescape stays off: the output is no HTML
        )
        provided: dict[str, Any] = environment.globals  # pyright: ignore[reportAssignmentType]
        provided["raise_exception"] = _raise
        provided["strftime_now"] = (now or datetime.now().astimezone()).strftime
        environment.filters["tojson"] = _tojson
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise InputError(f"chat template, line {error.lineno}: {error.message}", reason="template-invalid") from error
        self.source = source
        self.has_generation_marks = _MARKS.search(source) is not None
        self._variables = dict(variables)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, *, prompt: bool = False) -> str:
        """The text of the messages; with `prompt`, the assistant's header is appended. Raises RowDropped where it refuses."""
        return self.render_with_marks(messages, tools, prompt=prompt)[0]

    def render_with_marks(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, *, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the first and last-plus-one character of each generation block in it."""
        try:
            marked = self._template.render(
                messages=list(messages),
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=prompt,
                **self._variables,
            )
        except REFUSALS as error:
            raise RowDropped(reasons.TEMPLATE_REFUSED, f"the chat template refused: {error}") from error
        return _unmarked(marked) if self.has_generation_marks else (marked, [])


def _unmarked(marked: str) -> tuple[str, list[tuple[int, int]]]:
    pieces = re.split(f"({re.escape(_OPEN)}|{re.escape(_CLOSE)})", marked)
    text: list[str] = []
    spans: list[tuple[int, int]] = []
    length = opened = 0
    for piece in pieces:
        if piece == _OPEN:
            opened = length
        elif piece == _CLOSE:
            spans.append((opened, length))
        else:
            text.append(piece)
            length += len(piece)
    return "".join(text), spans


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
