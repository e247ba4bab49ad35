"""Why a row did not make it into the dataset. Every dropped row has exactly one of these codes.

`read == kept + dropped` holds for every run. Rows that a rule leaves out (`BY_RULE`) are healthy; all others are faults of
the input, count against the limit on the dropped share, and are set aside in the quarantine file.
"""

from __future__ import annotations

from typing import Final

MALFORMED: Final = "malformed"
"""Not a JSON object: torn, cut in mid-character, or foreign text."""
NOT_UNICODE: Final = "not-unicode"
"""Holds bytes that are no UTF-8, or one half of a surrogate pair."""
RECORD_TOO_LONG: Final = "record-too-long"
"""More bytes than a record may have: set aside by its first letters, so that memory stays bounded."""
FOREIGN_ROW: Final = "foreign-row"
"""An object without any column that holds a conversation or token ids."""
PROMPT_ONLY: Final = "prompt-only"
"""A prompt that nobody has answered: nothing to supervise."""
EMPTY_CONVERSATION: Final = "empty-conversation"
"""A conversation without turns, or whose turns are all empty."""
SYSTEM_ONLY: Final = "system-only"
"""Only system turns."""
ASSISTANT_FIRST: Final = "assistant-first"
"""The assistant speaks before anybody has asked."""
ROLE_REPEATED: Final = "role-repeated"
"""The user, or the assistant, has two turns in a row."""
TOOL_WITHOUT_CALL: Final = "tool-without-call"
"""A tool's result that no call of the assistant comes before."""
UNKNOWN_ROLE: Final = "unknown-role"
"""A role that the role map does not name."""
MALFORMED_TURN: Final = "malformed-turn"
"""A turn that is no object with a role and text."""
UNSUPPORTED_CONTENT: Final = "unsupported-content"
"""A content part that is not text (an image, audio)."""
MALFORMED_TOOLS: Final = "malformed-tools"
"""Tools that are neither a list nor JSON text of one."""
IDS_TYPE: Final = "ids-type"
"""Token ids, mask or labels that are no flat list of whole numbers."""
IDS_OUT_OF_RANGE: Final = "ids-out-of-range"
"""A token id below 0, or not below the vocabulary's size."""
MASK_MISSING: Final = "mask-missing"
"""Token ids without a mask or labels: what the model answered cannot be told from what it was asked."""
MASK_LENGTH: Final = "mask-length"
"""The mask has another length than the ids."""
MASK_VALUES: Final = "mask-values"
"""A mask value other than 0 and 1."""
LABELS_DISAGREE: Final = "labels-disagree"
"""A label other than -100 that differs from the id at its place."""
EMPTY_IDS: Final = "empty-ids"
"""No token at all."""
TEMPLATE_REFUSED: Final = "template-refused"
"""The chat template raised an error on this conversation."""
MASK_DRIFT: Final = "mask-drift"
"""The assistant's turns could not be located exactly in the rendered text."""
SPECIAL_IN_TEXT: Final = "special-token-in-text"
"""A turn's text spells a control token, which the tokenizer would read as one."""
NO_SUPERVISED_TOKEN: Final = "no-supervised-token"  # noqa: S105 - a reason, no secret
"""The mask is 0 everywhere."""
OVER_LONG: Final = "over-long"
"""More tokens than the limit."""
REPEAT: Final = "repeat"
"""The same ids and mask as a row that stays (under the smallest run name)."""
NOT_SAMPLED: Final = "not-sampled"
"""Left out by the seeded sampling to a budget."""

BY_RULE: Final = frozenset({OVER_LONG, REPEAT, NOT_SAMPLED, NO_SUPERVISED_TOKEN})
"""Reasons that say nothing against the input: neither set aside nor counted against the limit on the dropped share."""


class RowDropped(Exception):
    """A row that will not be in the dataset; caught, counted and listed by the merge."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
