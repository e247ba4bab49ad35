"""Loss masks against transformers' generation masks and against independent renderings of six template styles."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drafter_data.errors import InputError
from drafter_data.runs import reasons
from drafter_data.runs.conversations import read_conversation
from drafter_data.runs.options import TokenizeOptions
from drafter_data.runs.reasons import RowDropped
from drafter_data.tokenising.builtin import FOLDER, SPECIAL_TOKENS
from drafter_data.tokenising.chat import ChatTokenizer, load_chat_tokenizer
from tests.tokenising.styles import STYLES, Messages, write_tokenizer

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

SPECIALS = {*SPECIAL_TOKENS, *(name for style in STYLES.values() for name in style.specials)}
WORDS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(" \n\té漢😀"), min_size=1, max_size=30).filter(
    lambda text: not any(name in text for name in SPECIALS)
)
TALKS = st.tuples(st.booleans(), st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4), WORDS)


def messages_of(talk: tuple[bool, list[tuple[str, str]], str]) -> Messages:
    with_system, pairs, system = talk
    messages: Messages = [{"role": "system", "content": system}] if with_system else []
    for question, answer in pairs:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: write_tokenizer(root / name, s.template, s.specials, s.bos) for name, s in STYLES.items()}


@pytest.fixture(scope="module")
def ours(folders: dict[str, Path]) -> dict[str, ChatTokenizer]:
    return {name: load_chat_tokenizer(TokenizeOptions(str(folder))) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def theirs(folders: dict[str, Path]) -> dict[str, Any]:
    return {name: transformers.AutoTokenizer.from_pretrained(folder) for name, folder in folders.items()}


def expected_mask(tokenizer: Any, pieces: list[tuple[str, bool]]) -> tuple[list[int], list[int]]:
    """Ids of the joined text; a token is supervised when it holds a character that the model writes."""
    text = "".join(piece for piece, _ in pieces)
    written = [flag for piece, flag in pieces for _ in piece]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], [int(any(written[a:b])) for a, b in encoded["offset_mapping"]]


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(talk=TALKS)
def test_mask_equals_independent_rendering(ours: dict[str, ChatTokenizer], theirs: dict[str, Any], style: str, talk: Any) -> None:
    messages = messages_of(talk)
    if not STYLES[style].system:
        messages = [m for m in messages if m["role"] != "system"]
    ids_s, mask_s = ours[style].encode(read_conversation(messages))
    assert theirs[style].apply_chat_template(messages, tokenize=False) == "".join(p for p, _ in STYLES[style].render(messages))
    expected_ids, expected = expected_mask(theirs[style], STYLES[style].render(messages))
    assert ids_s.tolist() == expected_ids
    assert mask_s.tolist() == expected


@settings(max_examples=100, deadline=None)
@given(talk=TALKS, reasoning=WORDS | st.just(""), name=WORDS)
def test_mask_of_marked_template_equals_transformers(talk: Any, reasoning: str, name: str) -> None:
    messages = messages_of(talk)
    messages[-1]["reasoning_content"] = reasoning
    messages[-1]["tool_calls"] = [{"type": "function", "function": {"name": name, "arguments": {"é": [1, None, name]}}}]
    messages.append({"role": "tool", "content": name})
    messages.append({"role": "assistant", "content": "done"})
    tools = [{"type": "function", "function": {"name": name, "parameters": {"x": None}}}]
    tokenizer = marked_tokenizer()
    expected = tokenizer.apply_chat_template(messages, tools=tools, return_assistant_tokens_mask=True, return_dict=True)
    for source in ("builtin", str(FOLDER)):
        ids_s, mask_s = loaded(source).encode(read_conversation(messages, tools))
        assert ids_s.tolist() == expected["input_ids"]
        assert mask_s.tolist() == expected["assistant_masks"]


@cache
def marked_tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


@cache
def loaded(source: str) -> ChatTokenizer:
    return load_chat_tokenizer(TokenizeOptions(source))


def test_mask_where_earlier_reasoning_is_left_out_stays_exact(tmp_path: Path) -> None:
    """As Qwen3 does: the last answer is written with its reasoning, or an empty block, and earlier ones without."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% if loop.last %}"
        "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}"
        "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    folder = str(write_tokenizer(tmp_path / "t", template, ()))
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "first", "reasoning_content": "hm"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "second", "reasoning_content": "so"},
    ]
    written = {
        (True, False): "first<|im_end|><think>\nso\n</think>\n\nsecond<|im_end|>",
        (False, False): "first<|im_end|>second<|im_end|>",
        (True, True): "<think>\nso\n</think>\n\nsecond<|im_end|>",
    }
    for (reasoning, last), expected in written.items():
        options = TokenizeOptions(folder, supervise_reasoning=reasoning, last_turn_only=last)
        tokenizer = load_chat_tokenizer(options)
        ids_s, mask_s = tokenizer.encode(read_conversation(messages))
        assert decoded(folder, ids_s[mask_s == 1]) == expected
    ambiguous = [dict(m, content="same") for m in messages]
    ids_s, mask_s = load_chat_tokenizer(TokenizeOptions(folder)).encode(read_conversation(ambiguous))
    assert decoded(folder, ids_s[mask_s == 1]) == "same<|im_end|><think>\nso\n</think>\n\nsame<|im_end|>"


def decoded(folder: str, ids: Any) -> str:
    return transformers.AutoTokenizer.from_pretrained(folder).decode(ids.tolist())


@pytest.mark.parametrize("source", ["builtin", str(FOLDER)])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, '<think>\nhm\n</think>\nok\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>done<|im_end|>'),
        ({"supervise_reasoning": False}, 'ok\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>done<|im_end|>'),
        ({"supervise_tool_calls": False}, "<think>\nhm\n</think>\nokdone<|im_end|>"),
        ({"supervise_reasoning": False, "supervise_tool_calls": False}, "okdone<|im_end|>"),
        ({"last_turn_only": True}, "done<|im_end|>"),
    ],
)
def test_mask_options_leave_parts_of_answers_out(source: str, options: dict[str, bool], expected: str) -> None:
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "ok", "reasoning": "hm", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "done"},
    ]
    full_s, _ = load_chat_tokenizer(TokenizeOptions(source)).encode(read_conversation(messages))
    ids_s, mask_s = load_chat_tokenizer(TokenizeOptions(source, **options)).encode(read_conversation(messages))
    assert ids_s.tolist() == full_s.tolist()
    assert decoded(str(FOLDER), ids_s[mask_s == 1]) == expected


def test_special_token_in_text_never_becomes_a_special_id() -> None:
    messages = [{"role": "user", "content": "say <|im_end|>"}, {"role": "assistant", "content": "<|im_start|>"}]
    ids_s, mask_s = load_chat_tokenizer(TokenizeOptions()).encode(read_conversation(messages))
    assert [i for i in ids_s if i < 5] == [3, 4, 3, 4]
    assert decoded(str(FOLDER), ids_s[mask_s == 1]) == "<|im_start|><|im_end|>"
    with pytest.raises(RowDropped) as caught:
        load_chat_tokenizer(TokenizeOptions(str(FOLDER))).encode(read_conversation(messages))
    assert caught.value.reason == reasons.SPECIAL_IN_TEXT
    kept_s, _ = load_chat_tokenizer(TokenizeOptions(str(FOLDER), special_text="keep")).encode(read_conversation(messages))
    assert kept_s.tolist().count(4) == 3


def test_template_that_refuses_a_conversation_drops_the_row(ours: dict[str, ChatTokenizer]) -> None:
    messages = messages_of((True, [("a", "b")], "system"))
    with pytest.raises(RowDropped, match="System role not supported") as caught:
        ours["gemma"].encode(read_conversation(messages))
    assert caught.value.reason == reasons.TEMPLATE_REFUSED


def test_template_with_drifting_turns_drops_the_row(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role + (messages | length | string) + m.content }}{% endfor %}"
    folder = write_tokenizer(tmp_path / "t", template, ())
    with pytest.raises(RowDropped) as caught:
        load_chat_tokenizer(TokenizeOptions(str(folder))).encode(
            read_conversation(messages_of((False, [("a", "b"), ("c", "b")], "")))
        )
    assert caught.value.reason == reasons.MASK_DRIFT


def test_hashes_follow_tokenizer_and_template_not_the_folder(tmp_path: Path) -> None:
    style = STYLES["chatml"]
    folders = {
        "one": write_tokenizer(tmp_path / "one", style.template, style.specials),
        "copy": write_tokenizer(tmp_path / "copy", style.template, style.specials),
        "other template": write_tokenizer(tmp_path / "t", style.template + " ", style.specials),
        "other tokens": write_tokenizer(tmp_path / "v", style.template, (*style.specials, "<|more|>")),
    }
    found = {name: load_chat_tokenizer(TokenizeOptions(str(folder))) for name, folder in folders.items()}
    hashes = {name: (one.tokenizer_hash, one.template_hash) for name, one in found.items()}
    tokenizer, template = hashes["one"]
    assert hashes["copy"] == (tokenizer, template)
    assert hashes["other template"][0] == tokenizer
    assert hashes["other template"][1] != template
    assert hashes["other tokens"][0] != tokenizer
    assert hashes["other tokens"][1] == template


def test_tokenizer_without_template_or_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load_chat_tokenizer(TokenizeOptions("meta-llama/Llama-3.1-8B"))
    assert caught.value.reason == "tokenizer-missing"
    folder = write_tokenizer(tmp_path / "t", "", ())
    with pytest.raises(InputError) as caught:
        load_chat_tokenizer(TokenizeOptions(str(folder))).encode(read_conversation(messages_of((False, [("a", "b")], ""))))
    assert caught.value.reason == "template-missing"
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError) as caught:
        load_chat_tokenizer(TokenizeOptions(str(tmp_path / "empty")))
    assert caught.value.reason == "tokenizer-invalid"


REMOTE = '''
from transformers import PreTrainedTokenizer

class BytesTokenizer(PreTrainedTokenizer):
    """Bytes, and control tokens in angle brackets; renders its own conversations, as Kimi's does."""
    @property
    def vocab_size(self): return 260
    def get_vocab(self): return {str(i): i for i in range(256)} | self.added_tokens_encoder
    def _tokenize(self, text): return [str(b) for b in text.encode()]
    def _convert_token_to_id(self, token): return int(token)
    def _convert_id_to_token(self, index): return str(index)
    def apply_chat_template(self, conversation, tools=None, tokenize=False, add_generation_prompt=False, **kwargs):
        text = "".join(f"<|im_{m['role']}|>{m['content']}<|im_end|>" for m in conversation)
        return text + ("<|im_assistant|>" if add_generation_prompt else "")
'''


def test_remote_code_tokenizer_runs_only_when_asked_for(tmp_path: Path) -> None:
    names = ["<|im_user|>", "<|im_assistant|>", "<|im_end|>"]
    added = {
        str(256 + i): {"content": n, "special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
        for i, n in enumerate(names)
    }
    config = {
        "tokenizer_class": "BytesTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_bytes.BytesTokenizer", None]},
        "added_tokens_decoder": added,
        "chat_template": "own",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    marker = tmp_path / "ran"
    (tmp_path / "tokenization_bytes.py").write_text(f"open({str(marker)!r}, 'w').close()\n" + REMOTE)
    with pytest.raises(InputError) as caught:
        load_chat_tokenizer(TokenizeOptions(str(tmp_path)))
    assert caught.value.reason == "remote-code-refused"
    assert not marker.exists()
    tokenizer = load_chat_tokenizer(TokenizeOptions(str(tmp_path), trust_remote_code=True))
    ids_s, mask_s = tokenizer.encode(read_conversation(messages_of((False, [("hé", "漢"), ("q", "ab")], ""))))
    assert ids_s.tolist() == [256, *"hé".encode(), 258, 257, *"漢".encode(), 258, 256, 113, 258, 257, 97, 98, 258]
    assert mask_s.tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1]
