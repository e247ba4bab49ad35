"""Which rows a trainer may see, in which order, and on which side of the split. What a trainer would let through stops here.

A file that is as old as its receipt is what the store verified when it committed it, so that of a large dataset the cheap checks
(size, header, token ids, a few rows of states) decide; one that was written to since, and all of a small dataset, are read whole
against their checksums. Tensor legend: S tokens, L layers,
R tokens looked at, H hidden size, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from data_contracts.plan import Exclusion
from data_contracts.receipt import Receipt
from drafter_data.checkpoints import RmsNorm
from drafter_data.dataset import Dataset, Sample
from drafter_data.errors import DrafterDataError, SampleError
from drafter_data.files import read_ahead
from drafter_data.safetensors_file import TensorFile, as_float32
from drafter_data.store.store import Store
from drafter_data.trainers.layer_signature import LayerSignatures, norm_fault
from drafter_data.verification import check_columns_distinct, check_shape, check_token_ids, hash_and_check

Split = Literal["train", "validation"]
_ROWS_LOOKED_AT = 3
_HEADER_BYTES = 4096
_FILES_AHEAD, _WHOLE_FILES_AHEAD = 64, 4
READ_WHOLE_UP_TO_BYTES = 2_000_000_000
"""A dataset whose states take less is read whole, in a second or two, whatever its receipts say."""


@dataclass(frozen=True)
class HandoffRow:
    """One sample that a trainer is given. `row` is its place in the dataset."""

    row: int
    sample_key: str
    state_key: str
    num_tokens: int
    num_supervised: int
    split: Split
    bytes: int
    xxh3: str


@dataclass
class Selection:
    """`rows` in the trainer's order: training rows by sample key, then validation rows by sample key."""

    rows: list[HandoffRow] = field(default_factory=list[HandoffRow])
    exclusions: list[Exclusion] = field(default_factory=list[Exclusion])

    @property
    def train(self) -> list[HandoffRow]:
        """The rows to learn from."""
        return [row for row in self.rows if row.split == "train"]

    @property
    def validation(self) -> list[HandoffRow]:
        """The held-out rows."""
        return [row for row in self.rows if row.split == "validation"]


@dataclass(frozen=True)
class Verifier:
    """What the checks need of the verifier: its vocabulary size and its own final norm."""

    vocab_size: int
    norm: RmsNorm


def split_position(state_key: str) -> float:
    """A number in [0, 1) that depends on nothing but the prompt's content: two rows of one prompt never part company."""
    digest = hashlib.blake2b(b"split1" + bytes.fromhex(state_key), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def select_rows(
    dataset: Dataset,
    store: Store,
    verifier: Verifier,
    *,
    exclusions: Iterable[Exclusion] = (),
    validation_share: float = 0.1,
    read_whole: bool | None = None,
) -> Selection:
    """Checks every row of the dataset against its state and its receipt, and splits those that pass.

    `read_whole`: whether every state file is read whole here (no: the caller does it later). None: those that were written to since
    their receipts, and of a dataset of up to READ_WHOLE_UP_TO_BYTES all.
    """
    given = {exclusion.sample_key: exclusion for exclusion in exclusions}
    if read_whole is None and state_bytes(dataset, store) <= READ_WHOLE_UP_TO_BYTES:
        read_whole = True
    checks = _Checks(store, verifier, LayerSignatures(len(store.identity.layers)), read_whole)
    rows: list[HandoffRow] = []
    excluded: list[Exclusion] = []
    for sample in checks.read_ahead(dataset.samples()):
        if sample.sample_key in given:
            excluded.append(given[sample.sample_key])
            continue
        try:
            receipt = checks.check(sample)
        except (DrafterDataError, OSError) as error:
            excluded.append(exclusion_of(sample.sample_key, sample.state_key, error))
        else:
            rows.append(_row(sample, receipt, validation_share))
    out_of_order = checks.signatures.out_of_order()
    excluded += [
        exclusion_of(row.sample_key, row.state_key, SampleError(out_of_order[row.sample_key], reason="layer-order"))
        for row in rows
        if row.sample_key in out_of_order
    ]
    rows = _hold_out_at_least_one([row for row in rows if row.sample_key not in out_of_order])
    return Selection(
        sorted(rows, key=lambda row: (row.split, row.sample_key)), sorted(excluded, key=lambda exclusion: exclusion.sample_key)
    )


@dataclass
class _Checks:
    store: Store
    verifier: Verifier
    signatures: LayerSignatures
    read_whole: bool | None

    def read_ahead(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Yields the samples in their order while the disk reads what the next ones will be checked by: one wait after the other
        for a cold disk takes many times as long.
        """
        tail_bytes = _ROWS_LOOKED_AT * self.store.identity.bytes_per_token
        coming: deque[Sample] = deque()
        for sample in samples:
            head_bytes = 0 if self.read_whole else _HEADER_BYTES + sample.tokens * 8
            read_ahead(self.store.path_of(sample.state_key), head_bytes, tail_bytes)
            coming.append(sample)
            if len(coming) > (_WHOLE_FILES_AHEAD if self.read_whole else _FILES_AHEAD):
                yield coming.popleft()
        yield from coming

    def check(self, sample: Sample) -> Receipt:
        """The receipt of a sample that may be trained on; raises SampleError, MalformedFile or OSError with the reason."""
        label = f"sample {sample.sample_key[:12]}"
        _check_mask(sample, self.verifier.vocab_size, label)
        receipt = self.store.find(sample.state_key)
        if receipt is None:
            raise SampleError(f"{label}: no receipt in {self.store.root}; extract it", reason="state-missing")
        path = self.store.path_of(sample.state_key)
        if not path.exists():
            raise SampleError(f"{label}: {path} is gone although it has a receipt; run fsck", reason="state-missing")
        status = path.stat()
        if status.st_size != receipt.bytes:
            raise SampleError(
                f"{label}: {path}: expected {receipt.bytes} bytes as received, found {status.st_size}; run fsck, extract it again",
                reason="state-size",
            )
        with TensorFile.open(path) as file:
            self._check_content(file, sample, label)
            if self.read_whole or (self.read_whole is None and status.st_mtime > receipt.committed_at):
                check_whole(file, path, receipt, label)
        return receipt

    def _check_content(self, file: TensorFile, sample: Sample, label: str) -> None:
        identity = self.store.identity
        states_slh, token_ids_s = file.array("hidden_states"), file.array("token_ids")
        dtype, ids_dtype = file.tensors["hidden_states"].dtype, file.tensors["token_ids"].dtype
        check_shape(states_slh, dtype, sample.tokens, (len(identity.layers), identity.hidden_size), identity.dtype, label)
        if ids_dtype != "I64":
            raise SampleError(f"{label}: expected token_ids I64, found {ids_dtype}", reason="dtype")
        check_token_ids(token_ids_s, sample.input_ids_s, label)
        check_columns_distinct(states_slh, label)
        tail_rlh = as_float32(states_slh[-_ROWS_LOOKED_AT:], dtype)
        if not np.isfinite(tail_rlh).all():
            raise SampleError(f"{label}: a NaN or infinite value in the last tokens; extract it again", reason="not-finite")
        fault = norm_fault(tail_rlh[:, -1], self.verifier.norm, identity.final_norm)
        if fault:
            raise SampleError(f"{label}: {fault}", reason="wrong-norm")
        self.signatures.add(sample.sample_key, tail_rlh)


def check_whole(file: TensorFile, path: Path, receipt: Receipt, label: str) -> None:
    """One pass: content checks of the states, and the checksum of the whole file, in which they come last."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as handle:
        digest.update(handle.read(file.header_bytes + file.tensors["hidden_states"].start))
    hash_and_check(file.array("hidden_states"), receipt.dtype, digest, label)
    if digest.hexdigest() != receipt.xxh3:
        raise SampleError(
            f"{label}: {path} changed since it was received: expected checksum {receipt.xxh3}, found {digest.hexdigest()}; "
            "run fsck, extract it again",
            reason="checksum",
        )


@contextmanager
def checked_state(store: Store, row: HandoffRow) -> Generator[tuple[TensorFile, Receipt]]:
    """A selected row's state and receipt. Raises SampleError or MalformedFile when the one is not what the other says."""
    receipt, path = store.find(row.state_key), store.path_of(row.state_key)
    assert receipt is not None, "selected rows have receipts"
    with TensorFile.open(path) as file:
        check_whole(file, path, receipt, f"sample {row.sample_key[:12]}")
        yield file, receipt


def state_bytes(dataset: Dataset, store: Store) -> int:
    """Bytes of the states of all rows, headers aside."""
    return dataset.record.tokens * store.identity.bytes_per_token


def _check_mask(sample: Sample, vocab_size: int, label: str) -> None:
    if len(sample.loss_mask_s) != sample.tokens:
        raise SampleError(
            f"{label}: expected a loss mask of {sample.tokens} tokens, found {len(sample.loss_mask_s)}", reason="mask-length"
        )
    if trained_tokens(sample.loss_mask_s) == 0:
        raise SampleError(f"{label}: no supervised token after the first", reason="no-supervised-token")
    if int(sample.loss_mask_s.max()) > 1:
        raise SampleError(f"{label}: the loss mask holds {int(sample.loss_mask_s.max())}, expected 0 and 1", reason="mask-values")
    lowest, highest = int(sample.input_ids_s.min()), int(sample.input_ids_s.max())
    if lowest < 0 or highest >= vocab_size:
        raise SampleError(
            f"{label}: token ids {lowest}..{highest} for a vocabulary of {vocab_size}", reason="token-out-of-vocabulary"
        )


def trained_tokens(loss_mask_s: NDArray[np.uint8]) -> int:
    """Supervised tokens that a drafter can learn to predict: the first has no state before it to predict it from."""
    return int(np.count_nonzero(loss_mask_s[1:]))


def _row(sample: Sample, receipt: Receipt, validation_share: float) -> HandoffRow:
    return HandoffRow(
        row=sample.row,
        sample_key=sample.sample_key,
        state_key=sample.state_key,
        num_tokens=sample.tokens,
        num_supervised=int(np.count_nonzero(sample.loss_mask_s)),
        split="validation" if split_position(sample.state_key) < validation_share else "train",
        bytes=receipt.bytes,
        xxh3=receipt.xxh3,
    )


def _hold_out_at_least_one(rows: list[HandoffRow]) -> list[HandoffRow]:
    """A tiny dataset may fall on one side whole; trainers need both, so the prompt nearest the boundary changes sides."""
    positions = {row.state_key: split_position(row.state_key) for row in rows}
    sides = {row.split for row in rows}
    if len(positions) < 2 or len(sides) == 2:
        return rows
    moving = min(positions, key=positions.__getitem__) if sides == {"train"} else max(positions, key=positions.__getitem__)
    other: Split = "validation" if sides == {"train"} else "train"
    return [replace(row, split=other) if row.state_key == moving else row for row in rows]


def exclusion_of(sample_key: str, state_key: str, error: Exception) -> Exclusion:
    """The entry in the manifest for a row that failed a check."""
    reason = error.reason if isinstance(error, DrafterDataError) else "state-unreadable"
    label = f"sample {sample_key[:12]}"
    detail = str(error) if str(error).startswith(label) else f"{label}: {error}"
    return Exclusion(sample_key=sample_key, state_key=state_key, kind="failed", reason=reason, detail=detail[:500])


def nothing_left(selection: Selection, dataset: Dataset, store: Store) -> str:
    """What to say when nothing can be handed off, with the reasons counted."""
    reasons = Counter(exclusion.reason for exclusion in selection.exclusions)
    listed = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items())) or "none was excluded"
    return (
        f"nothing to hand off: of {dataset.record.rows} rows of {dataset.folder} {len(selection.rows)} may be trained on, expected "
        f"at least one to learn from and one to hold out ({listed}); see `drafter-data validate {store.root} "
        f"--dataset {dataset.folder}`"
    )
