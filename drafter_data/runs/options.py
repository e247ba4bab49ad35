"""What a merge is asked to do. Picklable: every worker process gets a copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from data_contracts.parameters import MergeParameters
from drafter_data.errors import UsageError
from drafter_data.runs.conversations import ROLE_MAP, ROLES

OverLong = Literal["drop", "cut"]


@dataclass(frozen=True, slots=True)
class TokenizeOptions:
    """How conversations become ids and mask.

    `supervise_reasoning` and `supervise_tool_calls` say whether those parts of an answer count in the loss mask (their ids
    stay in either case); `last_turn_only` supervises the last answer alone. `special_text` says what happens to a row whose
    text spells a control token that the tokenizer would read as one: `drop` it, or `keep` it as an engine would read it.
    `template_time` is what a template that writes the date is told; None is the time of the merge.
    """

    tokenizer: str = "builtin"
    trust_remote_code: bool = False
    supervise_reasoning: bool = True
    supervise_tool_calls: bool = True
    last_turn_only: bool = False
    special_text: Literal["drop", "keep"] = "drop"
    template_time: datetime | None = None


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """Everything that decides which rows a dataset holds. `None` means no limit; shares are of the rows read."""

    tokenize: TokenizeOptions = field(default_factory=TokenizeOptions)
    max_tokens: int | None = None
    over_long: OverLong = "drop"
    vocab_size: int | None = None
    role_map: Mapping[str, str] = field(default_factory=lambda: dict(ROLE_MAP))
    max_dropped_share: float = 0.5
    sample_rows: int | None = None
    sample_tokens: int | None = None
    seed: int = 0

    @classmethod
    def of(cls, rules: MergeParameters, *, tokenizer: str, max_tokens: int | None) -> MergeOptions:
        """The options of the parameters that the flow's form and the merge command fill in."""
        of_text = TokenizeOptions(
            tokenizer,
            rules.trust_remote_code,
            rules.supervise_reasoning,
            rules.supervise_tool_calls,
            rules.last_turn_only,
            rules.special_text,
            rules.template_time,
        )
        return cls(
            of_text,
            max_tokens,
            rules.over_long,
            rules.vocab_size,
            {**ROLE_MAP, **rules.roles},
            rules.max_dropped_share,
            rules.sample_rows,
            rules.sample_tokens,
            rules.sample_seed,
        )

    def check(self) -> None:
        """Raises UsageError for a value out of bounds."""
        bounds: tuple[tuple[str, int | None, int], ...] = (
            ("max_tokens", self.max_tokens, 2),
            ("vocab_size", self.vocab_size, 1),
            ("sample_rows", self.sample_rows, 1),
            ("sample_tokens", self.sample_tokens, 1),
        )
        for name, value, least in bounds:
            if value is not None and value < least:
                raise UsageError(f"{name}: expected at least {least}, found {value}")
        if not 0 <= self.max_dropped_share <= 1:
            raise UsageError(f"max_dropped_share: expected 0 to 1, found {self.max_dropped_share}")
        if self.over_long == "cut" and self.max_tokens is None:
            raise UsageError("over_long: cutting needs max_tokens, the length to cut to")
        for written, role in self.role_map.items():
            if role not in ROLES:
                raise UsageError(f"role map: {written}={role}: expected one of {', '.join(ROLES)}")

    def changed(self) -> dict[str, str]:
        """Every option that is not the default, as text, for the dataset's record."""
        default = MergeOptions()
        pairs = {name: (getattr(self, name), getattr(default, name)) for name in self.__slots__ if name != "tokenize"}
        of_text = TokenizeOptions()
        pairs |= {name: (getattr(self.tokenize, name), getattr(of_text, name)) for name in of_text.__slots__}
        return {name: str(value) for name, (value, standard) in sorted(pairs.items()) if value != standard}
