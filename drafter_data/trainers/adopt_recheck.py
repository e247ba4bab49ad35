"""Extracting a few adopted samples again from an engine at hand, and comparing.

Tensor legend: S tokens, L stored layers, H hidden size.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from data_contracts.dump import RID_PREFIX
from data_contracts.identity import StoreIdentity, state_key_of_bytes
from data_contracts.parameters import EngineParameters
from drafter_data.checkpoints import Checkpoint, RmsNorm
from drafter_data.engines.base import Engine, PrefillRequest
from drafter_data.engines.connect import connect
from drafter_data.errors import IdentityMismatch, PreflightRefused
from drafter_data.safetensors_file import as_float32
from drafter_data.trainers.adopt_sources import EarlierState
from drafter_data.verification import relative_frobenius

Recheck = Callable[[NDArray[np.int64], EarlierState], str | None]
"""Extracts a prompt again and says what differs, or None."""

_TOLERANCES = {"F32": 1e-3, "F16": 1e-2, "BF16": 5e-2}
"""Relative Frobenius distance that another batch or kernel may make (design: about 1e-5 in fp32, 3e-2 in bf16), with room."""
_DUMP_SECONDS, _REQUEST_SECONDS = 60.0, 600.0
_HOW_ONLY = {"dtype", "final_norm"}
"""Parts of an identity that say in which form states are kept, not which ones they are: either side may differ in them."""


@contextmanager
def engine_recheck(settings: EngineParameters, identity: StoreIdentity, model: Checkpoint) -> Generator[Recheck]:
    """Yields what extracts a prompt again and compares it layer by layer, in float32 and on one side of the norm.

    Raises PreflightRefused or InputError when the engine is not there, IdentityMismatch when it computes other states.
    """
    engine = _connected(settings, identity)
    try:
        info = engine.describe()
        found = info.identity
        differing = [line for line in identity.differences(found) if line.partition(":")[0] not in _HOW_ONLY]
        if differing:
            raise IdentityMismatch(
                f"the engine at {info.url} computes other states than were adopted (adopted != engine): {'; '.join(differing)}"
            )
        limit = max(_TOLERANCES[identity.dtype], _TOLERANCES[found.dtype])
        norm = model.final_norm() if found.final_norm != identity.final_norm else None

        def recheck(ids_s: NDArray[np.int64], state: EarlierState) -> str | None:
            ours_slh, theirs_slh = _extracted(engine, ids_s), np.array(as_float32(state.states_slh, state.dtype))
            if norm is not None:
                _pass_norm(ours_slh if found.final_norm == "pre" else theirs_slh, norm)
            distances_l = [relative_frobenius(theirs_slh[:, layer], ours_slh[:, layer]) for layer in range(ours_slh.shape[1])]
            worst = int(np.argmax(distances_l))
            if distances_l[worst] <= limit:
                return None
            return f"extracted again, layer {identity.layers[worst]} differs by {distances_l[worst]:.2g}, allowed {limit:g}"

        yield recheck
    finally:
        engine.close()


def _connected(settings: EngineParameters, identity: StoreIdentity) -> Engine:
    """The engine, whichever side of the norm it dumps its final state on."""
    asked = settings.model_copy(update={"layers": identity.layers, "final_norm": "pre"})
    try:
        return connect(asked, request_timeout_seconds=_REQUEST_SECONDS)
    except PreflightRefused as error:
        if error.reason != "final-norm-differs":
            raise
        return connect(asked.model_copy(update={"final_norm": "post"}), request_timeout_seconds=_REQUEST_SECONDS)


def _extracted(engine: Engine, ids_s: NDArray[np.int64]) -> NDArray[np.float32]:
    """The states of a prompt as the engine computes them now, float32 [S, L, H]."""
    key = state_key_of_bytes(ids_s.astype("<u4").tobytes())
    request = PrefillRequest(f"{RID_PREFIX}adopt-{secrets.token_hex(8)}", key, ids_s)
    reply = engine.send(request)
    dump = engine.claim(request, reply, time.monotonic() + _DUMP_SECONDS)
    try:
        return np.array(as_float32(dump.states_slh, dump.dtype))
    finally:
        engine.release(dump)


def _pass_norm(states_slh: NDArray[np.float32], norm: RmsNorm) -> None:
    states_slh[:, -1] = norm(states_slh[:, -1])
