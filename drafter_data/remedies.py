"""What to do about a failed chunk, by the reason code of its failures: the last column of the table in the UI."""

from __future__ import annotations

RETRY = "retry this run: it extracts what is missing and nothing else"

_REMEDIES = {
    "engine-lost": "see to the engine (its log, GPU memory), then retry this run",
    "engine-unreachable": "start the engine again, then retry this run",
    "engine-exited": "read the engine's log, start it again, then retry this run",
    "store-full": "free space on the store's disk, then retry this run",
    "store-error": "mend the store's disk, then retry this run",
    "lease-held": "another run works on this chunk: wait for it, then retry this run",
    "failures-in-a-row": "look at the engine and at the reason of the samples, then retry this run",
    "request-refused": "the engine refuses these prompts: drop them (longest row) or raise its limits, then retry this run",
    "dump-missing": "look at the engine's capture and the dump folder's space, then retry this run",
    "dump-ambiguous": "keep other clients off this engine, then retry this run",
    "dump-rejected": "look at the engine's log: it dumped something else than was asked, then retry this run",
    "prompt-tokens": "raise the engine's context length or drop longer rows, then retry this run",
    "recheck-differs": "the engine gave two different states for one prompt: look at its capture, then retry this run",
    "not-attempted": RETRY,
}


def remedy(reason: str) -> str:
    """One line for people."""
    return _REMEDIES.get(reason, RETRY)
