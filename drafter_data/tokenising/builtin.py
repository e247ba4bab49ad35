"""The tokenizer that ships: a byte-level BPE of 1,024 tokens in plain Python, for the embedded engine and the demo.

The package folder is a Hugging Face tokenizer folder, which transformers' AutoTokenizer loads and encodes alike (a test
holds them equal). Its 763 merges were trained with the `tokenizers` package on the docstrings of Python's standard library.
Ids: five special tokens, then one token for each byte, then the merges. The splitting pattern names ASCII classes only and
bounds every piece, so that Python's `re` and the Oniguruma of `tokenizers` cut alike and a piece costs bounded time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Final

from drafter_data.errors import InputError

PAD: Final = 0
BOS: Final = 1
EOS: Final = 2
IM_START: Final = 3
IM_END: Final = 4
SPECIAL_TOKENS: Final = ("<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
FOLDER: Final = Path(__file__).parent / "builtin_tokenizer"
_CACHED_PIECES = 1 << 18


def byte_letters() -> dict[int, str]:
    """The printable letter that stands for each byte in byte-level vocabularies (the table of GPT-2's encoder)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in letters:
            letters[byte] = chr(256 + len(letters) - len(printable))
    return letters


class _Pieces(dict[str, tuple[int, ...]]):
    """Token ids of a piece, computed on first use."""

    def __init__(self, tokenizer: BuiltinTokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, piece: str) -> tuple[int, ...]:
        ids = self._tokenizer.merge_piece(piece)
        if len(self) < _CACHED_PIECES:
            self[piece] = ids
        return ids


class BuiltinTokenizer:
    """Encodes any Unicode text and decodes it again, byte for byte."""

    vocab_size: Final = 1024

    def __init__(self) -> None:
        stored = json.loads((FOLDER / "tokenizer.json").read_bytes())
        self._id_of: dict[str, int] = stored["model"]["vocab"]
        self._rank_of: dict[tuple[str, str], int] = {tuple(pair): rank for rank, pair in enumerate(stored["model"]["merges"])}
        self._split = re.compile(stored["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"])
        self._specials = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
        self._letter_of = byte_letters()
        self._pieces = _Pieces(self)

    @property
    def folder(self) -> Path:
        """The Hugging Face tokenizer folder: tokenizer.json, tokenizer_config.json, chat_template.jinja."""
        return FOLDER

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        """Token ids of `text`. Special tokens written in it are plain text unless `specials` is set.

        Raises InputError (`not-unicode`) for a lone surrogate, which no UTF-8 text can hold.
        """
        if not specials:
            return self._encode_plain(text)
        ids: list[int] = []
        start = 0
        for match in self._specials.finditer(text):
            ids += self._encode_plain(text[start : match.start()])
            ids.append(SPECIAL_TOKENS.index(match.group()))
            start = match.end()
        return ids + self._encode_plain(text[start:])

    def _encode_plain(self, text: str) -> list[int]:
        ids: list[int] = []
        pieces = self._pieces
        for piece in self._split.findall(text):
            ids += pieces[piece]
        return ids

    def merge_piece(self, piece: str) -> tuple[int, ...]:
        """Token ids of one piece of the splitting pattern: the pair of lowest rank is merged first, the leftmost among equals."""
        try:
            symbols = [self._letter_of[byte] for byte in piece.encode()]
        except UnicodeEncodeError as error:
            raise InputError(
                f"text with a lone surrogate U+{ord(piece[error.start]):04X}: expected Unicode text that UTF-8 can hold; "
                "write the other half of the pair or replace it",
                reason="not-unicode",
            ) from error
        never = len(self._rank_of)
        while len(symbols) > 1:
            ranks = [self._rank_of.get(pair, never) for pair in pairwise(symbols)]
            best = min(ranks)
            if best == never:
                break
            at = ranks.index(best)
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        return tuple(self._id_of[symbol] for symbol in symbols)

    @cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        """The bytes that each id stands for; a special token's are its name."""
        byte_of = {letter: byte for byte, letter in self._letter_of.items()}
        by_id = sorted(self._id_of, key=self._id_of.__getitem__)
        specials = len(SPECIAL_TOKENS)
        plain = [bytes(byte_of[letter] for letter in token) for token in by_id[specials:]]
        return (*(name.encode() for name in SPECIAL_TOKENS), *plain)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens by their names; bytes that are no UTF-8 become U+FFFD.

        Raises IndexError for an id outside 0..1023.
        """
        return b"".join(self.token_bytes[i] for i in ids).decode(errors="replace")
