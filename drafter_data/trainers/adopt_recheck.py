"""Extracting a few adopted samples again from an engine at hand, and comparing."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_contracts.dump import RID_PREFIX
from data_contracts.identity import StoreIdentity, state_key_of_bytes
from data_contracts.parameters import EngineParameters
from drafter_data.engines.base import PrefillRequest
from drafter_data.errors import IdentityMismatch
from drafter_data.safetensors_file import as_float32
from drafter_data.trainers.adopt_sources import EarlierState

_TOLERANCES = {"F32": 1e-3, "F16": 1e-2, "BF16": 5e-2}
"""Relative Frobenius distance that another batch or kernel may make (design: about 1e-5 in fp32, 3e-2 in bf16), with room."""
_DUMP_SECONDS = 60.0


@contextmanager
def engine_recheck(
    url: str, model: Path, identity: StoreIdentity
) -> Generator[Callable[[NDArray[np.int64], EarlierState], str | None]]:
    """Yields a function that extracts a prompt again and says what differs, or None.

    Raises PreflightRefused or InputError when the engine is not there, IdentityMismatch when it computes other states.
    """
    from drafter_data.engines.connect import connect

    settings = EngineParameters(url=url, model=str(model), layers=identity.layers, final_norm=identity.final_norm)
    engine = connect(settings, request_timeout_seconds=600)
    try:
        found = engine.describe().identity
        if found != identity:
            raise IdentityMismatch(
                f"the engine at {url} computes other states than were adopted: {'; '.join(identity.differences(found))}"
            )

        def recheck(ids_s: NDArray[np.int64], state: EarlierState) -> str | None:
            key = state_key_of_bytes(ids_s.astype("<u4").tobytes())
            request = PrefillRequest(f"{RID_PREFIX}adopt-{secrets.token_hex(8)}", key, ids_s)
            reply = engine.send(request)
            dump = engine.claim(request, reply, time.monotonic() + _DUMP_SECONDS)
            try:
                ours, theirs = as_float32(dump.states_slh, dump.dtype), as_float32(state.states_slh, state.dtype)
                distance = float(np.linalg.norm(ours - theirs) / np.linalg.norm(ours)) if ours.shape == theirs.shape else np.inf
            finally:
                engine.release(dump)
                dump.close()
            limit = _TOLERANCES[identity.dtype]
            return None if distance <= limit else f"extracted again it differs by {distance:.2g}, allowed {limit:g}"

        yield recheck
    finally:
        engine.close()
