"""One record of a run, whatever its form, to token ids and loss mask."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from drafter_data.runs import reasons
from drafter_data.runs.conversations import CONVERSATION_COLUMNS, Conversation, read_conversation
from drafter_data.runs.reasons import RowDropped

ID_COLUMNS: Final = ("id", "source_id", "conversation_id", "uuid", "sample_id", "prompt_id", "custom_id")
MASK_COLUMNS: Final = ("loss_mask", "assistant_masks", "assistant_mask")
PROMPT_COLUMNS: Final = ("prompt", "question", "query", "instruction", "problem", "input", "text")
IGNORED_LABEL: Final = -100
ROW_COLUMNS: Final = frozenset({"input_ids", *CONVERSATION_COLUMNS, *PROMPT_COLUMNS})


class Encoder(Protocol):
    """Turns a conversation into ids (int32 [S]) and mask (uint8 [S]); raises RowDropped where it cannot."""

    def __call__(self, conversation: Conversation) -> tuple[NDArray[np.int32], NDArray[np.uint8]]: ...


def source_id_of(record: Mapping[str, Any]) -> str | None:
    """The id that the run itself gave to the row, as text."""
    for column in ID_COLUMNS:
        value = record.get(column)
        if isinstance(value, (str, int)) and not isinstance(value, bool) and value != "":
            return str(value)
    return None


def encode_record(
    record: Mapping[str, Any], encode: Encoder, role_map: Mapping[str, str], vocab_size: int | None
) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Ids int32 [S] and mask uint8 [S] of one record. Raises RowDropped with the reason why it is no row."""
    if record.get("input_ids") is not None:
        return _tokenised(record, vocab_size)
    for column in CONVERSATION_COLUMNS:
        if record.get(column) is not None:
            return encode(read_conversation(record[column], record.get("tools"), role_map=role_map, system=record.get("system")))
    for column in CONVERSATION_COLUMNS:
        if column in record:
            raise RowDropped(reasons.EMPTY_CONVERSATION, f"{column} is null")
    prompt = next((column for column in PROMPT_COLUMNS if record.get(column)), None)
    if prompt is not None:
        raise RowDropped(reasons.PROMPT_ONLY, f"only a prompt (column {prompt}): generate the answers first, then merge that run")
    raise RowDropped(
        reasons.FOREIGN_ROW, f"expected messages, conversations or input_ids, found {', '.join(list(record)[:8]) or 'nothing'}"
    )


def _tokenised(record: Mapping[str, Any], vocab_size: int | None) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    ids_s = whole_numbers("input_ids", record["input_ids"])
    if not len(ids_s):
        raise RowDropped(reasons.EMPTY_IDS, "input_ids is empty")
    limit = 2**31 if vocab_size is None else vocab_size
    low, high = int(ids_s.min()), int(ids_s.max())
    if low < 0 or high >= limit:
        raise RowDropped(reasons.IDS_OUT_OF_RANGE, f"input_ids: expected 0 to {limit - 1}, found {low if low < 0 else high}")
    return ids_s.astype(np.int32, copy=False), _mask_of(record, ids_s)


def _mask_of(record: Mapping[str, Any], ids_s: NDArray[np.signedinteger[Any]]) -> NDArray[np.uint8]:
    for column in MASK_COLUMNS:
        if record.get(column) is not None:
            mask_s = _flags(record[column]) if isinstance(record[column], list) else whole_numbers(column, record[column])
            if mask_s is None:
                mask_s = whole_numbers(column, record[column])
            if len(mask_s) != len(ids_s):
                raise RowDropped(reasons.MASK_LENGTH, f"{column} has {len(mask_s)} values for {len(ids_s)} ids")
            if len(mask_s) and (int(mask_s.min()) < 0 or int(mask_s.max()) > 1):
                raise RowDropped(
                    reasons.MASK_VALUES, f"{column}: expected 0 and 1, found {int(mask_s.min())} to {int(mask_s.max())}"
                )
            return mask_s.astype(np.uint8, copy=False)
    if record.get("labels") is None:
        raise RowDropped(reasons.MASK_MISSING, "input_ids without loss_mask, assistant_masks or labels")
    labels_s = whole_numbers("labels", record["labels"])
    if len(labels_s) != len(ids_s):
        raise RowDropped(reasons.MASK_LENGTH, f"labels has {len(labels_s)} values for {len(ids_s)} ids")
    supervised_s = labels_s != IGNORED_LABEL
    wrong = np.flatnonzero(supervised_s & (labels_s != ids_s))
    if len(wrong):
        at = int(wrong[0])
        raise RowDropped(reasons.LABELS_DISAGREE, f"labels[{at}] is {labels_s[at]}, input_ids[{at}] is {ids_s[at]}")
    return supervised_s.astype(np.uint8)


def _flags(values: list[Any]) -> NDArray[np.uint8] | None:
    """A list of small whole numbers or booleans as uint8 [S], fast; None for anything else."""
    try:
        return np.frombuffer(bytes(values), dtype=np.uint8)
    except (TypeError, ValueError):
        return None


def whole_numbers(column: str, values: Any) -> NDArray[np.signedinteger[Any]]:
    """A flat list of whole numbers (or booleans) as int32 or int64 [S], whatever width it came in."""
    if isinstance(values, list):
        try:
            return np.frombuffer(array("i", values), dtype=np.int32)  # several times as fast as np.asarray
        except (TypeError, OverflowError):
            pass  # not all whole numbers: the slow way finds out what they are
    try:
        found = np.asarray(values)
    except ValueError as error:
        raise RowDropped(reasons.IDS_TYPE, f"{column}: expected a flat list of whole numbers ({error})") from error
    if found.ndim == 1 and not len(found):
        return np.zeros(0, dtype=np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iubf":
        raise RowDropped(
            reasons.IDS_TYPE, f"{column}: expected a flat list of whole numbers, found {found.dtype} [{found.ndim} axes]"
        )
    if found.dtype.kind == "f" or (found.dtype.kind == "u" and found.dtype.itemsize == 8):
        exact = np.isfinite(found) & (found == np.floor(found)) & (np.abs(found) < 2.0**53)
        if not bool(exact.all()):
            raise RowDropped(reasons.IDS_TYPE, f"{column}: expected whole numbers, found {found[~exact][0]}")
    return found.astype(np.int64)
