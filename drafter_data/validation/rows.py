"""Checking the dataset's rows: ids, keys and masks agree with each other, one row group at a time."""

from __future__ import annotations

import numpy as np

from data_contracts.identity import sample_key, state_key_of_bytes
from data_contracts.validation import Finding
from drafter_data.dataset import Sample

MERGE_AGAIN = "merge the runs again into a new dataset folder"


def check_row(sample: Sample, file: str) -> Finding | None:
    """Whether a row is what its keys say: state key from the ids, sample key from ids and mask, one mask value a token."""
    ids_s, mask_s = sample.input_ids_s, sample.loss_mask_s

    def finding(reason: str, expected: str, found: str) -> Finding:
        return Finding(
            reason=reason, state_key=sample.state_key, file=f"{file} row {sample.row}", expected=expected, found=found,
            remedy=MERGE_AGAIN,
        )  # fmt: skip

    if len(mask_s) != len(ids_s):
        return finding("mask-length", f"{len(ids_s)} mask values, one a token", f"{len(mask_s)}")
    if ids_s.min(initial=0) < 0:
        return finding("token-ids", "ids of at least 0", str(ids_s.min()))
    if mask_s.max(initial=0) > 1:
        return finding("mask-value", "0 or 1", str(mask_s.max()))
    found = state_key_of_bytes(ids_s.astype("<u4").tobytes())
    if found != sample.state_key:
        return finding("row-state-key", f"state key {sample.state_key}", f"ids of {found}")
    if sample_key(found, mask_s.astype(np.uint8).tobytes()) != sample.sample_key:
        return finding("row-sample-key", f"sample key {sample.sample_key}", "another loss mask than the key names")
    return None
