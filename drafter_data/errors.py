"""All failures that drafter-data raises on purpose.

Every one carries a reason code (`reason`), counted, shown and listed as it is, and a message that names what, where, expected,
found and what to do next.

* DrafterDataError
    * UsageError - bad parameters or input: exit 2, nothing half-written
        * InputError - a generation run, dataset or checkpoint that cannot be used
        * PreflightRefused - the engine, the dump folder, the store or the disk would fail the run later
        * IdentityMismatch - a store, plan or hand-off made for something else
    * SampleError - one sample did not make it; the run goes on
        * RequestRefused - the engine answered 4xx: never retried
        * DumpMissing - no complete dump in time
        * DumpAmbiguous - more than one dump could be this sample's: ask again alone
        * DumpRejected - a dump that is not what was asked for (rows, ids, proof, content, hostile file)
            * PassMixed - the request shared its forward pass with others: says nothing about the sample
    * EngineLost - the engine is dead or hung: the chunk fails resumable
        * EngineChanged - it gives other states than it did earlier: the chunk is taken back
    * Interrupted - stopped on request, resumable
    * TooManyFailures - n samples failed in a row: the chunk stops, resumable
    * ChunkIncomplete - a chunk ran to its end with failed samples
    * StoreError - the store cannot take or give a state
        * StoreFull - stopped before the disk is full; resumable
        * LeaseHeld - another holder works on this chunk or dump folder
        * StateCorrupt - a committed state is not what its receipt says
    * GateClosed - too many samples failed: no hand-off
    * TrainingFailed - the training job did not leave a complete fresh checkpoint
"""

from __future__ import annotations


class DrafterDataError(Exception):
    """Base of all failures. `reason` is a stable kebab-case code."""

    reason: str = "failed"
    exit_code: int = 1

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        if reason is not None:
            self.reason = reason


class UsageError(DrafterDataError):
    """Bad parameters or input; nothing was written."""

    reason = "bad-usage"
    exit_code = 2


class InputError(UsageError):
    """A generation run, dataset or checkpoint that cannot be used."""

    reason = "bad-input"


class PreflightRefused(UsageError):
    """What would fail after hours is refused in seconds."""

    reason = "preflight-refused"


class IdentityMismatch(UsageError):
    """A store, plan or hand-off that was made for something else; both identities are in the message."""

    reason = "identity-mismatch"


class SampleError(DrafterDataError):
    """One sample did not make it."""

    reason = "sample-failed"


class RequestRefused(SampleError):
    """The engine answered 4xx."""

    reason = "request-refused"


class DumpMissing(SampleError):
    """No complete dump in time."""

    reason = "dump-missing"


class DumpAmbiguous(SampleError):
    """More than one dump could be this sample's."""

    reason = "dump-ambiguous"


class DumpRejected(SampleError):
    """A dump that is not what was asked for."""

    reason = "dump-rejected"


class PassMixed(DumpRejected):
    """The request shared its forward pass with others, so no dump is its own."""

    reason = "pass-mixed"


class EngineLost(DrafterDataError):
    """The engine is dead or hung."""

    reason = "engine-lost"


class EngineChanged(EngineLost):
    """The engine gives other states than it did earlier."""

    reason = "engine-changed"


class Interrupted(DrafterDataError):
    """Stopped on request."""

    reason = "interrupted"


class TooManyFailures(DrafterDataError):
    """So many samples failed in a row that going on would only burn time."""

    reason = "failures-in-a-row"


class ChunkIncomplete(DrafterDataError):
    """A chunk ran to its end with failed samples."""

    reason = "chunk-incomplete"


class StoreError(DrafterDataError):
    """The store cannot take or give a state."""

    reason = "store-error"


class StoreFull(StoreError):
    """Too little free space to go on."""

    reason = "store-full"


class LeaseHeld(StoreError):
    """Another holder works here."""

    reason = "lease-held"


class StateCorrupt(StoreError):
    """A committed state is not what its receipt says."""

    reason = "state-corrupt"


class GateClosed(DrafterDataError):
    """The share of failed samples is above the limit."""

    reason = "gate-closed"


class TrainingFailed(DrafterDataError):
    """The training job left no complete fresh checkpoint."""

    reason = "training-failed"
