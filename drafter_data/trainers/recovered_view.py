"""States after the norm for a trainer that norms them itself: a copy whose final states are brought before the norm again.

A root mean square norm is y = x / rms(x) * scale (Zhang and Sennrich 2019). y / scale is x but for its size rms(x), which is lost;
the norm of it is y again, since its own root mean square is 1. So what the trainer computes from it is right to rounding, while the
size of the state is not the model's: it is done only where it is asked for (option `recover_pre_norm`), and recorded.

Tensor legend: S tokens, L stored layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drafter_data.checkpoints import Checkpoint, RmsNorm
from drafter_data.dataset import Dataset, Sample
from drafter_data.errors import InputError, StoreError
from drafter_data.files import read_ahead
from drafter_data.safetensors_file import NUMPY_DTYPES, as_float32, state_header
from drafter_data.store.store import Store
from drafter_data.trainers.conversion import HashingFile, convert_rows, workers_of
from drafter_data.trainers.selection import HandoffRow, Selection, checked_state

OPTION = "recover_pre_norm"
_SMALLEST_SCALE = 1e-6


def write_recovered_states(
    folder: Path,
    dataset: Dataset,
    store: Store,
    selection: Selection,
    model: Checkpoint,
    options: Mapping[str, str],
    file_of: Callable[[int], str],
) -> Selection:
    """Writes a state file for every row, which must have been read whole before; returns the selection with the new checksums.

    A row's file is named by its place, so none can be left out any more: raises StoreError when one fails its checks now, and
    InputError (`norm-not-invertible`) where the norm's scale is zero in a channel.
    """
    writer = RecoveredWriter(store, model.final_norm())
    workers = workers_of(options)
    converted, excluded = convert_rows(folder, dataset, selection.rows, file_of, writer.write, workers, writer.read_ahead)
    if excluded:
        raise StoreError(f"a state changed during the hand-off: {excluded[0].detail}; try again")
    rows = [replace(row, bytes=converted[n].bytes, xxh3=converted[n].xxh3) for n, row in enumerate(selection.rows)]
    return Selection(rows, selection.exclusions)


class RecoveredWriter:
    """Writes one sample's state file, its final states divided by the norm's scale, in the store's dtype."""

    def __init__(self, store: Store, norm: RmsNorm) -> None:
        small = int(np.count_nonzero(np.abs(norm.scale_h) < _SMALLEST_SCALE))
        if small:
            raise InputError(
                f"the verifier's final norm has a scale of zero in {small} of {len(norm.scale_h)} channels: what was before it "
                "cannot be recovered; hand off to specforge, or extract with final_norm: pre",
                reason="norm-not-invertible",
            )
        self._store = store
        self._scale_h = norm.scale_h

    def read_ahead(self, row: HandoffRow) -> None:
        """Lets the disk begin with a state that is to be converted soon."""
        read_ahead(self._store.path_of(row.state_key))

    def write(self, row: HandoffRow, sample: Sample, out: HashingFile) -> None:
        """Raises SampleError, MalformedFile or StateCorrupt when the state is not what its receipt says."""
        with checked_state(self._store, row) as (file, receipt):
            states_slh = np.array(file.array("hidden_states"))
            final_sh = as_float32(states_slh[:, -1], receipt.dtype) / self._scale_h
            states_slh[:, -1] = _in_storage_form(final_sh, receipt.dtype)
            if not np.isfinite(as_float32(states_slh[:, -1], receipt.dtype)).all():
                raise InputError(
                    f"sample {row.sample_key[:12]}: its final state divided by the norm's scale does not fit into {receipt.dtype}; "
                    "hand off to specforge, or extract with final_norm: pre",
                    reason="norm-not-invertible",
                )
            out.write(state_header(states_slh.shape, receipt.dtype))
            out.write(sample.input_ids_s.astype("<i8").tobytes())
            out.write(states_slh.data)


def _in_storage_form(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """float32 values in a store's dtype; bfloat16 rounded to nearest, ties to even."""
    if dtype != "BF16":
        return values.astype(NUMPY_DTYPES[dtype])
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
