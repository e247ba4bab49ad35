"""The reduced draft vocabulary: counted over the supervised tokens of exactly the training rows, kept in the job's folder.

Kept per job and never in the store or the dataset: speculators reuses a frequency file that it finds without recounting, whatever
dataset it came from. Array legend: V target vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from drafter_data.dataset import Dataset
from drafter_data.errors import InputError
from drafter_data.files import atomic_path
from drafter_data.trainers.selection import HandoffRow


def count_supervised(dataset: Dataset, rows: list[HandoffRow], vocab_size: int) -> NDArray[np.int64]:
    """How often each token id is supervised in `rows`: int64 [V]."""
    counts_v = np.zeros(vocab_size, dtype=np.int64)
    for sample in dataset.take([row.row for row in rows]):
        counts_v += np.bincount(sample.input_ids_s[sample.loss_mask_s.astype(bool)], minlength=vocab_size)
    return counts_v


def draft_vocabulary(counts_v: NDArray[np.int64], draft_size: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The most frequent `draft_size` ids: `d2t` int64 [D] (target id minus draft id) and `t2d` bool [V].

    Equal counts go to the lower id, so that the maps are the same on every machine. Raises InputError for a size outside 1..V.
    """
    if not 1 <= draft_size <= len(counts_v):
        raise InputError(
            f"draft_vocab_size {draft_size}: expected 1 to {len(counts_v)}, the verifier's vocabulary", reason="draft-vocab-size"
        )
    by_count = np.lexsort((np.arange(len(counts_v)), -counts_v))
    chosen_d = np.sort(by_count[:draft_size]).astype(np.int64)
    t2d_v = np.zeros(len(counts_v), dtype=np.bool_)
    t2d_v[chosen_d] = True
    return chosen_d - np.arange(draft_size, dtype=np.int64), t2d_v


def write_vocabulary(folder: Path, counts_v: NDArray[np.int64], draft_size: int | None) -> list[Path]:
    """Writes `token_freq.npy` int64 [V] and, with a size, `d2t-<size>.npy` and `t2d-<size>.npy`; returns what was written."""
    arrays: dict[str, NDArray[np.int64] | NDArray[np.bool_]] = {"token_freq.npy": counts_v}
    if draft_size is not None:
        d2t_d, t2d_v = draft_vocabulary(counts_v, draft_size)
        arrays |= {f"d2t-{draft_size}.npy": d2t_d, f"t2d-{draft_size}.npy": t2d_v}
    for name, array in arrays.items():
        with atomic_path(folder / name) as temporary, temporary.open("wb") as handle:
            np.save(handle, array)
    return [folder / name for name in arrays]
