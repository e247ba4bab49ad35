"""The shipped tokenizer against transformers and itself."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_data.errors import InputError
from drafter_data.tokenising.builtin import SPECIAL_TOKENS, BuiltinTokenizer

os.environ.setdefault("HF_HUB_OFFLINE", "1")
OURS = BuiltinTokenizer()
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=200) | st.text(
    st.sampled_from(" \n\t\r\x85\u2028aZ0 9é漢😀'<|im_end|>\u0301\ufeff"), max_size=200
)


@pytest.fixture(scope="module")
def theirs() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(OURS.folder)


@settings(max_examples=400, deadline=None)
@given(text=TEXTS)
def test_encode_arbitrary_text_equals_transformers(theirs: Any, text: str) -> None:
    expected = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert OURS.encode(text) == expected
    assert OURS.encode(text, specials=True) == theirs.encode(text, add_special_tokens=False)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_decode_of_encode_is_the_text(text: str) -> None:
    ids = OURS.encode(text)
    assert OURS.decode(ids) == text
    assert all(len(SPECIAL_TOKENS) <= i < OURS.vocab_size for i in ids)


def test_special_tokens_have_the_first_ids(theirs: Any) -> None:
    assert [theirs.convert_tokens_to_ids(name) for name in SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    assert len(theirs) == OURS.vocab_size == len(OURS.token_bytes) == len(set(OURS.token_bytes))
    assert OURS.encode("<|im_end|>", specials=True) == [4]
    assert 4 not in OURS.encode("<|im_end|>")
    assert OURS.decode([1, 3, 4]) == "<|bos|><|im_start|><|im_end|>"


def test_encode_lone_surrogate_is_refused() -> None:
    with pytest.raises(InputError, match="U\\+D800") as caught:
        OURS.encode("a \ud800 b")
    assert caught.value.reason == "not-unicode"


def test_encode_english_text_exceeds_one_megabyte_a_second() -> None:
    text = ((OURS.encode.__doc__ or "") + (BuiltinTokenizer.__doc__ or "")) * 4000
    start = time.process_time()
    OURS.encode(text)
    assert len(text) / (time.process_time() - start) > 1e6
