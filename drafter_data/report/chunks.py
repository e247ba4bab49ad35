"""How far each chunk is, as one word: the squares of the chunk grid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal

from data_contracts.status import ChunkStatus

ChunkState = Literal["stored", "at work", "failed", "partly", "waiting"]
STATES: Final[tuple[ChunkState, ...]] = ("stored", "at work", "failed", "partly", "waiting")
_LETTER: Final[dict[ChunkState, str]] = {"stored": "█", "at work": "▒", "failed": "X", "partly": "░", "waiting": "·"}


def state_of(chunk: ChunkStatus) -> ChunkState:
    """What is to be said first of a chunk: that it is whole, worked on, has failed samples, was begun, or not."""
    if chunk.done >= chunk.samples:
        return "stored"
    if chunk.holder:
        return "at work"
    if chunk.failed:
        return "failed"
    return "partly" if chunk.done else "waiting"


def states_of(chunks: Sequence[ChunkStatus]) -> list[ChunkState]:
    """One a chunk, in the order of the plan."""
    return [state_of(chunk) for chunk in chunks]


def counted(states: Sequence[ChunkState]) -> str:
    """`12 stored, 1 failed`, in the order of STATES."""
    counts = Counter(states)
    return ", ".join(f"{counts[state]:,} {state}" for state in STATES if counts[state])


def grid_lines(states: Sequence[ChunkState], width: int = 100) -> list[str]:
    """The grid for a terminal, a letter a chunk, and its legend."""
    letters = "".join(_LETTER[state] for state in states)
    rows = [letters[start : start + width] for start in range(0, len(letters), width)]
    present = set(states)
    return [*rows, "  ".join(f"{_LETTER[state]} {state}" for state in STATES if state in present)] if rows else []
