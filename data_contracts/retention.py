"""What `gc` found in a store, and what it removed."""

from __future__ import annotations

from data_contracts.record import Record


class Unneeded(Record):
    """A state that nothing kept names. `linked`: a hand-off that is no more, or a copy, still holds the same bytes on disk."""

    state_key: str
    tokens: int
    bytes: int
    linked: bool


class GcReport(Record):
    """`kept_*` name what the states were compared with; `unknown_plans` are datasets that were planned here and are not kept."""

    store: str
    states: int
    bytes: int
    kept_datasets: tuple[str, ...]
    kept_handoffs: tuple[str, ...]
    unknown_plans: tuple[str, ...] = ()
    unneeded: tuple[Unneeded, ...] = ()
    orphans: int = 0
    removed: int = 0

    @property
    def unneeded_bytes(self) -> int:
        """Bytes of the states that nothing names."""
        return sum(one.bytes for one in self.unneeded)
