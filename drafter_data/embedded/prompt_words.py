"""Words for sample prompts: a few sentence frames, and what fills them."""

from __future__ import annotations

import numpy as np

_FRAMES = (
    "Explain how {} and {} work together in a {}.",
    "Write a short note about {} for a {} who has never seen a {}.",
    "What should I check first when the {} of my {} stops after the {}?",
    "Compare {} with {} and say which one suits a small {}.",
    "Give me three reasons to keep the {} next to the {} instead of the {}.",
    "Summarise what we know about {}, {} and {} in plain words.",
    "How would you plan a week around {}, one {} and a late {}?",
    "List the steps from {} to {} without losing the {}.",
)
_WORD_LINES = (
    "river garden engine letter winter market bridge kitchen signal harbour teacher window pattern ladder museum forest",
    "ticket valley number camera station paper island button orchard doctor journey copper thunder village blanket compass",
    "library mirror sailor basket lantern meadow puzzle recipe shadow tunnel violin walnut anchor canvas desert feather",
    "glacier hammer insect jacket kettle lemon magnet needle ocean pepper quarry ribbon saddle temple umbrella velvet",
    "whistle yard zipper archive balance circuit database element function gradient histogram index journal kernel language",
    "memory network operator parser query router scheduler table update vector worker branch budget cable deadline editor",
    "filter group header invoice job key layout metric node option packet queue record sample token unit",
)
_WORDS = tuple(word for line in _WORD_LINES for word in line.split())


def prompt_of(rng: np.random.Generator, characters: int) -> str:
    """Sentences of about `characters` in all, at least one."""
    text = ""
    while not text or len(text) < characters:
        frame = _FRAMES[int(rng.integers(len(_FRAMES)))]
        text += (" " if text else "") + frame.format(*(_WORDS[i] for i in rng.integers(len(_WORDS), size=3)))
    return text
