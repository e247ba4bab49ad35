"""What to do about a failed chunk, by the reason code of its failures: the last column of the table in the UI.

Every reason that a sample, the store or the engine can fail with has an entry, also where a retry is all there is to do: a remedy
that mends nothing would send somebody in circles.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

RETRY = "retry this run: it extracts what is missing and nothing else"
_THEN = "then retry this run"
_OTHER_CLIENTS = f"keep other clients off this engine and its dump folder, {_THEN}"
_NO_CACHE = f"start the engine with --disable-radix-cache, {_THEN}"
_WRONG_DUMP = f"look at the engine's log: it dumped something else than was asked; restart it with the printed command, {_THEN}"
_NUMBERS = f"the model gave such values itself: check its dtype and weights, or drop the row, {_THEN}"
_OTHER_MODEL = f"the engine computes with other weights than the model folder: name the served folder, {_THEN}"
_FOLDER = f"something else writes into the dump folder: give the engine a folder of its own (mode 0700), {_THEN}"
_DAMAGED = f"run `drafter-data fsck STORE --deep --repair`, {_THEN}"
_ENGINE = f"see to the engine (its log, GPU memory), {_THEN}"
_DATASET = "the row itself is at fault: merge the runs again without it"
_ADOPT = "the earlier extraction is at fault: extract this sample again"

REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        # the engine
        "engine-lost": _ENGINE,
        "engine-changed": f"start the engine as it was (model, layers, norm; the store's provenance.jsonl has its flags), {_THEN}",
        "engine-hung": f"the engine answers nothing: end it, read its log, start it again, {_THEN}",
        "engine-silent": f"the engine answers too late: look at its load, or raise the request timeout, {_THEN}",
        "engine-broke": _ENGINE,
        "engine-unreachable": f"start the engine again, {_THEN}",
        "engine-exited": f"read the engine's log, start it again, {_THEN}",
        "engine-not-ready": f"read the engine's log: it did not come up in time; start it yourself and name its URL, {_THEN}",
        "engine-not-there": f"start the engine, {_THEN}",
        "engine-busy": f"the engine turns requests away: take other load off it or lower the requests in flight, {_THEN}",
        "engine-breaks": "this prompt makes the engine fail each time: report it to the engine's makers, and drop the row",
        "no-answer": f"the engine answers others but never this prompt: read its log; drop the row or raise the timeout, {_THEN}",
        "bad-reply": f"something else answers at the URL, or a proxy in between: name the engine's own URL, {_THEN}",
        "port-taken": f"end what uses the port, or name another one, {_THEN}",
        "request-refused": f"the engine refuses these prompts: drop them (longest row) or raise its limits, {_THEN}",
        "prompt-tokens": f"raise the engine's context length or drop longer rows, {_THEN}",
        "no-capture-hook": f"restart the engine with the command of `drafter-data engine`: it runs without the hook, {_THEN}",
        "capture-failed": f"the message has what the hook failed with: mend that, restart the engine, {_THEN}",
        "failures-in-a-row": f"look at the engine and at the reason of the samples, {_THEN}",
        # the dumps
        "dump-missing": f"look at the engine's capture and the dump folder's space, {_THEN}",
        "dump-ambiguous": _OTHER_CLIENTS,
        "dump-rejected": _WRONG_DUMP,
        "dump-malformed": f"look at the engine's log and the dump folder's disk: a dump is cut or no safetensors file, {_THEN}",
        "dump-folder-full": f"free the dump folder or enlarge it (RAM disk: remount with a larger size), {_THEN}",
        "dump-folder-held": f"another run reads this dump folder: wait for it or end it, {_THEN}",
        "pass-mixed": f"start the engine with --prefill-max-requests 1, or stop what else asks it, {_THEN}",
        "cached-prefix": _NO_CACHE,
        "row-count": f"a cached prefix or a cut prompt: start the engine with --disable-radix-cache, {_THEN}",
        "token-ids": _OTHER_CLIENTS,
        "label-differs": f"engine and run are of different versions, or the hook was changed: install one version, {_THEN}",
        "shape": f"the engine stores other layers or another hidden size: restart it with the printed command, {_THEN}",
        "dtype": f"the engine runs in another dtype than the store: restart it with that one, or name a new store, {_THEN}",
        "layers-equal": f"two layer ids name one state: check the engine's layer ids, restart it, {_THEN}",
        "layers-missing": _ADOPT,
        "not-finite": _NUMBERS,
        "zero-rows": f"the engine left rows unwritten: look at its capture and version, {_THEN}",
        "proof-failed": _OTHER_MODEL,
        "no-proof": f"the engine gives no log-probabilities to prove dumps by: allow them on the engine, {_THEN}",
        "one-token-unproven": "a prompt of one token cannot be proven without labels: use the labelled hook, or drop the row",
        "states-unlike": _NO_CACHE + "; if it stays, the capture gives other states under load",
        "recheck-differs": f"the engine gave two different states for one prompt: look at its capture, {_THEN}",
        "hostile-entry": _FOLDER,
        "hostile-name": _FOLDER,
        # the store
        "store-full": f"free space on the store's disk, {_THEN}",
        "store-read-only": f"mount the store's disk writable again, {_THEN}",
        "store-error": f"mend the store's disk, {_THEN}",
        "state-corrupt": _DAMAGED,
        "state-missing": RETRY,
        "state-size": _DAMAGED,
        "state-unreadable": f"mend the store's disk; remove what it has lost, run `drafter-data fsck STORE --repair`, {_THEN}",
        "checksum": _DAMAGED,
        "store-busy": f"another run works on this store: wait for it or end it, {_THEN}",
        "lease-held": f"another run works on this chunk: wait for it, {_THEN}",
        "conversion-running": f"another process converts into this folder: wait for it or end it, {_THEN}",
        # rows, hand-off and earlier extractions
        "mask-length": _DATASET,
        "mask-values": _DATASET,
        "no-supervised-token": "nothing: the row has no token to train on",
        "token-out-of-vocabulary": f"the row was tokenised for another model: merge with this model's tokenizer, {_THEN}",
        "wrong-norm": f"the final state is on the other side of the norm: name the right final_norm, and a new store, {_THEN}",
        "layer-order": f"its layers are stored in another order: check the engine's layer ids and version, {_THEN}",
        "no-such-prompt": "the earlier extraction has no such prompt: name the dataset that it was made of",
        "states-of-another-prompt": _ADOPT,
        "differs-from-engine": _ADOPT + ", or name the engine that it was made with",
        "file-malformed": _ADOPT,
        "unreadable": _ADOPT,
        # nothing is wrong with the sample
        "not-attempted": RETRY,
        "interrupted": RETRY,
        "sample-failed": f"read the detail of the failure and the engine's log, {_THEN}",
    }
)


def remedy(reason: str) -> str:
    """One line for people."""
    return REMEDIES.get(reason, RETRY)
