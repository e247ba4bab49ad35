"""What one process does: read a piece of a run, tokenise, check, spill."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

import numpy as np
from numpy.typing import NDArray

from drafter_data.errors import InputError
from drafter_data.runs import reasons
from drafter_data.runs.conversations import Conversation
from drafter_data.runs.cutting import cut_length
from drafter_data.runs.options import MergeOptions
from drafter_data.runs.reasons import RowDropped
from drafter_data.runs.records import Record
from drafter_data.runs.rows import encode_record, source_id_of
from drafter_data.runs.spill import Spill
from drafter_data.runs.units import Unit, read_unit
from drafter_data.tokenising.chat import ChatTokenizer, load_chat_tokenizer

_QUARANTINED_LETTERS: Final = 1 << 16


@dataclass(slots=True)
class UnitReport:
    """What became of one piece. `lines` is how many lines it has, so that those of the next piece can be numbered."""

    unit: int
    read: int = 0
    lines: int = 0
    tokenised: int = 0
    dropped: Counter[str] = field(default_factory=Counter[str])


@dataclass(frozen=True, slots=True)
class TokenizerNote:
    """Which tokenizer and template a merge used."""

    name: str
    tokenizer_hash: str
    template_hash: str


class Worker:
    """Turns pieces into spilled rows and a quarantine file a piece. Memory is bounded by one block and the spill's buffer."""

    def __init__(self, folder: Path, partitions: int, options: MergeOptions, *, keys_only: bool = False) -> None:
        self._folder = folder
        self._options = options
        self._spill = Spill(folder, partitions, keys_only=keys_only)
        self._tokenizer: ChatTokenizer | None = None

    def process(self, unit: Unit) -> UnitReport:
        """Reads one piece to its end. Raises InputError where the file cannot be read."""
        report = UnitReport(unit.index)
        with (self._folder / quarantine_name(unit.index)).open("w", encoding="utf-8", newline="\n") as quarantine:
            for record in read_unit(unit):
                if record.lines_only:
                    report.lines = record.line
                    break
                report.read += 1
                try:
                    self._take(unit, record)
                except RowDropped as dropped:
                    report.dropped[dropped.reason] += 1
                    if dropped.reason not in reasons.BY_RULE:
                        _set_aside(quarantine, record, dropped)
        self._spill.flush()
        return report

    def close(self) -> None:
        """Ends the spill files."""
        self._spill.close()

    def _take(self, unit: Unit, record: Record) -> None:
        if record.reason:
            raise RowDropped(record.reason, record.detail)
        if not isinstance(record.value, dict):
            raise RowDropped(reasons.MALFORMED, f"expected a JSON object, found {type(record.value).__name__}")
        try:
            ids_s, mask_s = encode_record(record.value, self._encode, self._options.role_map, self._options.vocab_size)
            source_id = source_id_of(record.value)
            if source_id is not None:
                source_id.encode()
        except (UnicodeEncodeError, InputError) as error:
            if isinstance(error, InputError) and error.reason != reasons.NOT_UNICODE:
                raise
            raise RowDropped(reasons.NOT_UNICODE, str(error)) from error
        self._spill.add(unit.index, record.line, source_id, *self._fitted(ids_s, mask_s))

    def describe_tokenizer(self) -> TokenizerNote:
        """Loads the tokenizer and says which one it is. Raises InputError where it cannot be loaded."""
        loaded = self._loaded()
        return TokenizerNote(loaded.name, loaded.tokenizer_hash, loaded.template_hash)

    def _encode(self, conversation: Conversation) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        return self._loaded().encode(conversation)

    def _loaded(self) -> ChatTokenizer:
        if self._tokenizer is None:
            self._tokenizer = load_chat_tokenizer(self._options.tokenize)
        return self._tokenizer

    def _fitted(self, ids_s: NDArray[np.int32], mask_s: NDArray[np.uint8]) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        limit = self._options.max_tokens
        if limit is not None and len(ids_s) > limit:
            if self._options.over_long == "drop":
                raise RowDropped(reasons.OVER_LONG, f"{len(ids_s)} tokens, the limit is {limit}")
            length = cut_length(ids_s, limit)
            ids_s, mask_s = ids_s[:length].copy(), mask_s[:length].copy()
        if not mask_s.any():
            raise RowDropped(reasons.NO_SUPERVISED_TOKEN, f"none of {len(ids_s)} tokens is supervised")
        return ids_s, mask_s


def quarantine_name(unit: int) -> str:
    """File name of the records of one piece that were set aside."""
    return f"q{unit:08d}.jsonl"


def _set_aside(quarantine: IO[str], record: Record, dropped: RowDropped) -> None:
    raw = record.raw or json.dumps(record.value, ensure_ascii=True, default=_shown)
    entry = {"line": record.line, "reason": dropped.reason, "detail": dropped.detail[:500], "record": raw[:_QUARANTINED_LETTERS]}
    if len(raw) > _QUARANTINED_LETTERS:
        entry["record_letters"] = len(raw)
    quarantine.write(json.dumps(entry) + "\n")


def _shown(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray) else repr(value)
