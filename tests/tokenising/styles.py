"""Six template styles, each with an independent rendering: pieces of text, and whether the model writes them.

The templates are written for these tests in the manner of the six families; none is a copy.
"""

# ruff: noqa: E501 - templates are one line each
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter_data.tokenising.builtin import FOLDER

Messages = list[dict[str, Any]]
Pieces = list[tuple[str, bool]]


@dataclass(frozen=True)
class Style:
    template: str
    specials: tuple[str, ...]
    render: Callable[[Messages], Pieces]
    bos: str = ""
    system: bool = True


def chatml(messages: Messages) -> Pieces:
    pieces: Pieces = []
    for m in messages:
        if m["role"] == "assistant":
            pieces += [("<|im_start|>assistant\n", False), (m["content"] + "<|im_end|>", True), ("\n", False)]
        else:
            pieces.append((f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n", False))
    return pieces


def llama3(messages: Messages) -> Pieces:
    pieces: Pieces = [("<|begin_of_text|>", False)]
    for m in messages:
        pieces.append((f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n", False))
        pieces.append((m["content"].strip() + "<|eot_id|>", m["role"] == "assistant"))
    return pieces


def mistral(messages: Messages) -> Pieces:
    pieces: Pieces = [("<s>", False)]
    system = ""
    for m in messages:
        if m["role"] == "system":
            system = m["content"] + "\n\n"
        elif m["role"] == "assistant":
            pieces.append((" " + m["content"] + "</s>", True))
        else:
            pieces.append((f"[INST] {system}{m['content']}[/INST]", False))
            system = ""
    return pieces


def deepseek(messages: Messages) -> Pieces:
    pieces: Pieces = [("<｜begin▁of▁sentence｜>", False)]
    pieces += [(m["content"], False) for m in messages if m["role"] == "system"]
    for m in messages:
        if m["role"] == "user":
            pieces.append(("<｜User｜>" + m["content"] + "<｜Assistant｜>", False))
        elif m["role"] == "assistant":
            pieces.append((m["content"].split("</think>")[-1] + "<｜end▁of▁sentence｜>", True))
    return pieces


def kimi(messages: Messages) -> Pieces:
    pieces: Pieces = []
    for m in messages:
        header = {"user": "<|im_user|>", "assistant": "<|im_assistant|>", "system": "<|im_system|>"}[m["role"]]
        pieces.append((f"{header}{m['role']}<|im_middle|>", False))
        pieces.append((m["content"] + "<|im_end|>", m["role"] == "assistant"))
    return pieces


def gemma(messages: Messages) -> Pieces:
    pieces: Pieces = [("<bos>", False)]
    for m in messages:
        model = m["role"] == "assistant"
        pieces.append((f"<start_of_turn>{'model' if model else 'user'}\n", False))
        pieces += [(m["content"].strip() + "<end_of_turn>", model), ("\n", False)]
    return pieces


STYLES = {
    "chatml": Style(
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        ("<|im_start|>", "<|im_end|>"),
        chatml,
    ),
    "llama3": Style(
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + "
        "'<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        llama3,
        "<|begin_of_text|>",
    ),
    "mistral": Style(
        "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set ns.system = m.content + '\n\n' %}{% elif m.role == 'user' %}{{ '[INST] ' + ns.system + m.content + '[/INST]' }}"
        "{% set ns.system = '' %}{% elif m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}{% else %}"
        "{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}",
        ("<s>", "</s>", "[INST]", "[/INST]"),
        mistral,
        "<s>",
    ),
    "deepseek": Style(
        "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.system = ns.system + m.content %}"
        "{% endif %}{% endfor %}{{ bos_token + ns.system }}{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
        "{% elif m.role == 'assistant' %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}",
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        deepseek,
        "<｜begin▁of▁sentence｜>",
    ),
    "kimi": Style(
        "{% for m in messages %}{% set r = m.role %}{{ '<|im_' + r + '|>' + r + '<|im_middle|>' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}",
        ("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>"),
        kimi,
    ),
    "gemma": Style(
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        gemma,
        "<bos>",
        system=False,
    ),
}


def write_tokenizer(folder: Path, template: str, specials: tuple[str, ...], bos: str = "") -> Path:
    """A tokenizer folder: the shipped vocabulary with other control tokens and another template."""
    folder.mkdir(parents=True)
    stored = json.loads((FOLDER / "tokenizer.json").read_text())
    for name in specials:
        if not any(token["content"] == name for token in stored["added_tokens"]):
            form = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
            stored["added_tokens"].append({"id": 1024 + len(stored["added_tokens"]) - 5, "content": name, **form})
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **({"bos_token": bos} if bos else {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    return folder
