"""Conversations in the forms in use, brought into one.

Read are `messages` and `conversations` with `role`/`content` or `from`/`value`; content as text, as parts, or null; tool
calls and tool definitions as lists or JSON text; reasoning as `reasoning_content`, `reasoning` or `thinking`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from drafter_data.runs import reasons
from drafter_data.runs.reasons import RowDropped

CONVERSATION_COLUMNS: Final = ("messages", "conversations", "conversation")
ROLE_MAP: Final[Mapping[str, str]] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "function_call": "call",
    "tool_call": "call",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "ipython": "tool",
}
"""Role as written to role as read; `call` is an assistant turn whose text is the JSON of its tool calls."""
ROLES: Final = ("system", "developer", "user", "assistant", "tool", "call")
_REASONING_KEYS: Final = ("reasoning_content", "reasoning", "thinking")
_CALL_ONLY: Final = "__call_only__"
_CALL_MARKS: Final = ("tool_call", "<function", "[TOOL_CALLS]", "<|python_tag|>", "<function_call>", "Action:")
"""Ways in which models spell a call in their text, where the run kept that text as it was generated."""
_TEXT_PARTS: Final = ("text", "input_text", "output_text")


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn. `tool_calls` are `{"type": "function", "function": {"name", "arguments"}}`; extras are other keys, as they were."""

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()
    extras: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in order, and the definitions of the tools that were on offer (opaque: passed to the template as they are)."""

    turns: tuple[Turn, ...]
    tools: tuple[Any, ...] = ()


def read_conversation(turns: Any, tools: Any = None, *, role_map: Mapping[str, str] = ROLE_MAP, system: Any = None) -> Conversation:
    """The conversation of one row. Raises RowDropped with the reason why it is none."""
    if isinstance(turns, str):
        turns = _json_of(turns, reasons.MALFORMED_TURN, "turns as text that is no JSON")
    if not isinstance(turns, list):
        raise RowDropped(reasons.MALFORMED_TURN, f"turns: expected a list, found {type(turns).__name__}")
    read: tuple[Turn, ...] = ()
    for position, turn in enumerate(turns):
        read = _joined(read, _read_turn(position, turn, role_map))
    if isinstance(system, str) and system and (not read or read[0].role != "system"):
        read = (Turn("system", system), *read)
    _check_order(read)
    return Conversation(read, _read_tools(tools))


def _read_turn(position: int, turn: Any, role_map: Mapping[str, str]) -> Turn:
    if not isinstance(turn, dict):
        raise RowDropped(reasons.MALFORMED_TURN, f"turn {position}: expected an object, found {type(turn).__name__}")
    written = turn.get("role") if turn.get("role") is not None else turn.get("from")
    if not isinstance(written, str):
        raise RowDropped(reasons.MALFORMED_TURN, f"turn {position}: expected a role, found {written!r}")
    role = role_map.get(written, role_map.get(written.strip().lower()))
    if role is None:
        raise RowDropped(reasons.UNKNOWN_ROLE, f"turn {position}: role {written!r} is not in the role map")
    text = _text_of(position, turn["content"] if turn.get("content") is not None else turn.get("value"))
    if role == "call":
        return _read_call_turn(position, text)
    reasoning = next((turn[key] for key in _REASONING_KEYS if isinstance(turn.get(key), str)), "")
    calls = tuple(_read_call(position, call) for call in _list_of(position, turn.get("tool_calls")))
    if isinstance(turn.get("function_call"), dict):
        calls = (*calls, _read_call(position, turn["function_call"]))
    known = {"role", "from", "content", "value", "tool_calls", "function_call", *_REASONING_KEYS}
    extras = {key: value for key, value in turn.items() if key not in known and value is not None}
    return Turn(role, text, reasoning, calls if role == "assistant" else (), extras)


def _text_of(position: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise RowDropped(reasons.MALFORMED_TURN, f"turn {position}: content is a {type(content).__name__}, expected text")
    return "".join(_part_of(position, part) for part in content)


def _part_of(position: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type", "text") in _TEXT_PARTS:
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise RowDropped(reasons.UNSUPPORTED_CONTENT, f"turn {position}: content part {kind!r} is not text")


def _list_of(position: int, value: Any) -> list[Any]:
    if isinstance(value, str) and value.strip():
        value = _json_of(value, reasons.MALFORMED_TURN, f"turn {position}: tool_calls as text that is no JSON")
    if value is None or value == "":
        return []
    if not isinstance(value, list):
        raise RowDropped(reasons.MALFORMED_TURN, f"turn {position}: tool_calls is a {type(value).__name__}, expected a list")
    return value


def _read_call(position: int, call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowDropped(reasons.MALFORMED_TURN, f"turn {position}: a tool call without a function name")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        with suppress(ValueError):  # free-form arguments are passed to the template as the text that they are
            arguments = _loads(arguments)
    read: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if isinstance(call.get("id"), str):
        read["id"] = call["id"]
    return read


def _joined(before: tuple[Turn, ...], turn: Turn) -> tuple[Turn, ...]:
    """ShareGPT writes an assistant's words and each of its calls as turns of their own: they are one turn."""
    last = before[-1] if before else None
    if last and last.role == "assistant" and turn.role == "assistant" and turn.extras.get(_CALL_ONLY):
        return (*before[:-1], replace(last, tool_calls=(*last.tool_calls, *turn.tool_calls)))
    return (*before, turn)


def _read_call_turn(position: int, text: str) -> Turn:
    """ShareGPT's `function_call`: the text is the JSON of one call or of a list of them; other text stays text."""
    try:
        calls = _loads(text)
    except ValueError:
        return Turn("assistant", text)
    calls = calls if isinstance(calls, list) else [calls]
    return Turn("assistant", "", "", tuple(_read_call(position, call) for call in calls), {_CALL_ONLY: True})


def _read_tools(tools: Any) -> tuple[Any, ...]:
    if isinstance(tools, str):
        tools = _json_of(tools, reasons.MALFORMED_TOOLS, "tools as text that is no JSON") if tools.strip() else None
    if tools is None:
        return ()
    if isinstance(tools, dict):
        tools = [tools]
    if not isinstance(tools, list):
        raise RowDropped(reasons.MALFORMED_TOOLS, f"tools: expected a list, found {type(tools).__name__}")
    return tuple(
        _json_of(tool, reasons.MALFORMED_TOOLS, "a tool as text that is no JSON")
        if isinstance(tool, str) and tool.lstrip().startswith("{")
        else tool
        for tool in tools
    )


def _json_of(text: str, reason: str, what: str) -> Any:
    try:
        return _loads(text)
    except ValueError as error:
        raise RowDropped(reason, f"{what} ({error})") from error


def _loads(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, also for one that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _check_order(turns: tuple[Turn, ...]) -> None:
    """One reason for a conversation that cannot be trained on, the most telling first."""
    talk = [turn for turn in turns if turn.role not in ("system", "developer")]
    if not turns or not any(turn.content or turn.tool_calls or turn.reasoning for turn in turns):
        raise RowDropped(reasons.EMPTY_CONVERSATION, f"{len(turns)} turns without any text")
    if not talk:
        raise RowDropped(reasons.SYSTEM_ONLY, f"{len(turns)} turns, all of them system")
    if talk[0].role == "assistant":
        raise RowDropped(reasons.ASSISTANT_FIRST, "the first turn is the assistant's")
    called = False  # whether a tool's result may come now
    for position, turn in enumerate(talk):
        before = talk[position - 1].role if position else ""
        if turn.role == "tool":
            if not called:
                raise RowDropped(reasons.TOOL_WITHOUT_CALL, f"turn {position} is a tool's result without a call before it")
        elif turn.role == before:
            raise RowDropped(reasons.ROLE_REPEATED, f"turns {position - 1} and {position} are both the {turn.role}'s")
        else:
            called = bool(turn.tool_calls) or any(mark in turn.content for mark in _CALL_MARKS)
    if not any(turn.role == "assistant" for turn in talk):
        raise RowDropped(reasons.PROMPT_ONLY, "no turn of the assistant: generate the answers first")
