"""Where in a rendered conversation the assistant speaks, for templates without generation marks.

The conversation is rendered turn by turn: an answer begins where the text of everything before it, with the assistant's
header, ends, and ends where the text up to and with that turn ends. Both must be exact prefixes of the whole. Templates
that write an earlier answer otherwise than the last one (they leave out its reasoning) break the second prefix; then the
answer's content and what follows it must stand right before the next turn. What cannot be located exactly is dropped as
`mask-drift`, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from drafter_data.runs import reasons
from drafter_data.runs.reasons import RowDropped

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], bool], str]
"""Messages, and whether to append the assistant's header, to text."""
Span = tuple[int, int]
_SENTINEL: Final = "ZqxjAnswerPlaceZqxj"
_OPENERS: Final = ("<think>", "<reasoning>", "◁think▷")


def answer_spans(messages: Sequence[Message], text: str, render: Render, endings: Sequence[str]) -> list[Span]:
    """First and last-plus-one character of each assistant turn in `text`, from its first letter to its end-of-turn token.

    `endings` are the control tokens; white space that the template writes behind the last one is not the model's.
    """
    spans: list[Span] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = _start(messages, index, text, render)
        end = _end(messages, index, text, render, start)
        spans.append((start, _without_trailing_space(text, start, end, endings)))
    return spans


def _start(messages: Sequence[Message], index: int, text: str, render: Render) -> int:
    with_header = render(messages[:index], True)
    if text.startswith(with_header):
        return len(with_header)
    for opener in _OPENERS:  # the header opens the reasoning, which this turn was rendered without
        opened = with_header.rfind(opener)
        if opened > 0 and text.startswith(with_header[:opened]):
            return opened
    without = render(messages[:index], False)
    if text.startswith(without) and without != with_header and not with_header.startswith(without):
        return len(without)
    raise _drift(index, "the text before it is no prefix of the whole")


def _end(messages: Sequence[Message], index: int, text: str, render: Render, start: int) -> int:
    through = render(messages[: index + 1], False)
    if text.startswith(through) and len(through) >= start:
        return len(through)
    content = str(messages[index].get("content") or "").strip()
    at = through.rfind(content, start) if content else -1
    tail = through[at:] if at >= 0 else ""
    found = text.rfind(tail, start, _next_content(messages, index, text, render)) if tail else -1
    if found < 0:
        raise _drift(index, "the text up to it is no prefix of the whole, and its content cannot be located")
    return found + len(tail)


def _next_content(messages: Sequence[Message], index: int, text: str, render: Render) -> int:
    """Where the content of the turn behind an answer begins: between the answer and it stands that turn's header alone."""
    if index + 1 == len(messages):
        return len(text)
    other = render([*messages[: index + 1], {**messages[index + 1], "content": _SENTINEL}, *messages[index + 2 :]], False)
    at = other.find(_SENTINEL)
    return at if at >= 0 and other[:at] == text[:at] else -1


def content_place(messages: Sequence[Message], index: int, text: str, span: Span, render: Render) -> Span:
    """Where inside an answer's span its content stands: reasoning comes before, tool calls behind."""
    with_sentinel = [*messages[:index], {**messages[index], "content": _SENTINEL}, *messages[index + 1 :]]
    other = render(with_sentinel, False)
    at = other.find(_SENTINEL, span[0])
    if at < span[0] or at > span[1] or other[:at] != text[:at]:
        raise _drift(index, "its content cannot be told from its reasoning and calls")
    behind = other[at + len(_SENTINEL) :]
    end = len(text) - len(behind)
    return (at, end) if text.endswith(behind) and at <= end <= span[1] else (at, at)


def _without_trailing_space(text: str, start: int, end: int, endings: Sequence[str]) -> int:
    trimmed = text[start:end].rstrip(" \t\r\n")
    return start + len(trimmed) if trimmed.endswith(tuple(endings)) else end


def common_prefix(left: str, right: str) -> int:
    """Letters that both texts begin with."""
    if right.startswith(left):
        return len(left)
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[:middle] == right[:middle] else (low, middle - 1)
    return low


def _drift(index: int, what: str) -> RowDropped:
    return RowDropped(reasons.MASK_DRIFT, f"turn {index}: {what}")
