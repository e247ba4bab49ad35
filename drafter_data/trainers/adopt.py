"""Taking an earlier extraction into a store: what proves to be the states of its prompt, sample by sample.

Beside the checks of every commit (shape, dtype, ids, finite, distinct layers) two find what no header shows: layers in another
order or on the wrong side of the norm (layer_signature.py), and states of another prompt. For the latter the output matrix is
asked: the final state of token t must favour token t+1 of its own prompt over tokens of the same prompt elsewhere. A prompt whose
own tokens are not favoured, where those of the extraction as a whole are, has somebody else's states.

Tensor legend: S tokens, L stored layers, H hidden size, R positions looked at, K shifts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_contracts.identity import StateDtype, StoreIdentity, state_key_of_bytes
from data_contracts.record import Record
from data_contracts.validation import Finding
from drafter_data.checkpoints import Checkpoint, RmsNorm, default_layers
from drafter_data.engines.base import ClaimedDump
from drafter_data.errors import DrafterDataError, DumpRejected, InputError
from drafter_data.safetensors_file import as_float32
from drafter_data.store.store import Store
from drafter_data.trainers.adopt_recheck import Recheck
from drafter_data.trainers.adopt_sources import EarlierExtraction, EarlierSample, EarlierState
from drafter_data.trainers.layer_signature import LayerSignatures, norm_fault
from drafter_data.verification import check_columns_distinct, check_shape, check_token_ids

_POSITIONS = 256
_SHIFTS = 8
_SIGNIFICANT = 3.5
"""Standard errors: somebody else's states reach it once in 4,000 samples."""
_TELLING = 2 * _SIGNIFICANT
"""What the middle sample must reach before a lack of it in another says anything."""
_ADOPTED_CHUNK = "adopted"


class AdoptReport(Record):
    """`read == adopted + already_there + sum(rejected.values())`."""

    source: str
    store: str
    read: int
    adopted: int
    already_there: int
    rejected: dict[str, int] = {}
    favour_median: float = 0.0
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class _Judged:
    """A sample that passed its own checks. `favour` is in standard errors."""

    sample: EarlierSample
    key: str
    candidate: int
    favour: float


class Adoption:
    """One earlier extraction on its way into one store."""

    def __init__(self, extraction: EarlierExtraction, store: Store, model: Checkpoint) -> None:
        self._extraction = extraction
        self._store = store
        self._head_rows = model.lm_head_rows()
        self._norm: RmsNorm = model.final_norm()
        self._vocab_size = model.vocab_size
        self._signatures = LayerSignatures(len(store.identity.layers))
        self._rejected: list[Finding] = []

    def run(self, recheck: Recheck | None = None, rechecks: int = 0) -> AdoptReport:
        """Judges every sample, then commits those that hold. `recheck` extracts a prompt again and says what differs.

        Reads the source twice. Raises OSError or StoreFull when the store cannot take more; what was committed stays.
        """
        judged: list[_Judged] = []
        read = 0
        for sample in self._extraction.samples():
            read += 1
            try:
                judged.append(self._judge(sample))
            except (DrafterDataError, OSError) as error:
                self._reject(sample.name, "", error)
        median = float(np.median([each.favour for each in judged])) if judged else 0.0
        judged = self._without_outliers(judged, median)
        if recheck is not None:
            judged = self._rechecked(judged, recheck, rechecks)
        adopted, already_there = self._commit_all(judged)
        return AdoptReport(
            source=self._extraction.kind,
            store=str(self._store.root),
            read=read,
            adopted=adopted,
            already_there=already_there,
            rejected=dict(sorted(Counter(finding.reason for finding in self._rejected).items())),
            favour_median=median,
            findings=tuple(self._rejected),
        )

    def _judge(self, sample: EarlierSample) -> _Judged:
        state = sample.load()
        fitting = [n for n, ids_s in enumerate(sample.candidates) if len(ids_s) == len(state.states_slh)]
        if not sample.candidates:
            raise DumpRejected("belongs to no prompt of the dataset", reason="no-such-prompt")
        if not fitting:
            raise DumpRejected(
                f"expected {len(sample.candidates[0])} rows, found {len(state.states_slh)}: rows are missing", reason="row-count"
            )
        self._check_content(sample, state)
        favours = [self._favour(state, sample.candidates[n]) for n in fitting]
        best = int(np.argmax(favours))
        if len(fitting) > 1 and favours[best] < _SIGNIFICANT + np.log10(len(fitting)):
            raise DumpRejected(f"fits none of the {len(fitting)} prompts of its length", reason="no-such-prompt")
        ids_s = sample.candidates[fitting[best]]
        if int(ids_s.min()) < 0 or int(ids_s.max()) >= self._vocab_size:
            raise DumpRejected("token ids outside the model's vocabulary", reason="token-out-of-vocabulary")
        check_token_ids(state.token_ids_s, ids_s, sample.name)
        self._signatures.add(sample.name, as_float32(state.states_slh[-3:], state.dtype))
        return _Judged(sample, state_key_of_bytes(ids_s.astype("<u4").tobytes()), fitting[best], favours[best])

    def _check_content(self, sample: EarlierSample, state: EarlierState) -> None:
        identity = self._store.identity
        check_shape(
            state.states_slh,
            state.dtype,
            len(state.states_slh),
            (len(identity.layers), identity.hidden_size),
            identity.dtype,
            sample.name,
        )
        check_columns_distinct(state.states_slh, sample.name)
        tail_rh = as_float32(state.states_slh[-3:, -1], state.dtype)
        fault = norm_fault(tail_rh, self._norm, identity.final_norm)
        if fault:
            raise DumpRejected(fault, reason="wrong-norm")

    def _favour(self, state: EarlierState, ids_s: NDArray[np.int64]) -> float:
        """By how many standard errors the final states favour the next tokens of this prompt over its tokens elsewhere.

        A difference of logits is one of log-probabilities; its spread under chance is that of the tokens elsewhere.
        """
        if len(ids_s) < 3 or int(ids_s.min()) < 0 or int(ids_s.max()) >= self._vocab_size:
            return 0.0
        at_r = np.unique(np.linspace(0, len(ids_s) - 2, min(_POSITIONS, len(ids_s) - 1)).astype(np.int64))
        final_rh = as_float32(state.states_slh[at_r, -1], state.dtype)
        if self._store.identity.final_norm == "pre":
            final_rh = self._norm(final_rh)
        next_r = ids_s[at_r + 1]
        own_r = np.einsum("rh,rh->r", final_rh, self._head_rows(next_r.tolist()))
        shifts = np.unique(np.linspace(1, max(1, len(at_r) - 1), _SHIFTS).astype(np.int64))
        others_kr = np.stack([np.einsum("rh,rh->r", final_rh, self._head_rows(np.roll(next_r, int(k)).tolist())) for k in shifts])
        gain_r = own_r - others_kr.mean(axis=0)
        if not np.isfinite(gain_r).all():
            raise DumpRejected("a NaN or infinite value in the final states", reason="not-finite")
        chance = float(np.sqrt(np.sum(others_kr.var(axis=0, ddof=1) * (1 + 1 / len(shifts))))) if len(shifts) > 1 else np.inf
        return float(gain_r.sum() / (chance + 1e-9))

    def _without_outliers(self, judged: list[_Judged], median: float) -> list[_Judged]:
        out_of_order = self._signatures.out_of_order()
        kept: list[_Judged] = []
        for each in judged:
            if each.sample.name in out_of_order:
                self._reject(each.sample.name, each.key, DumpRejected(out_of_order[each.sample.name], reason="layer-order"))
            elif median > _TELLING and each.favour < _SIGNIFICANT:
                told = f"its states favour its own tokens by {each.favour:.1f} standard errors, those of others by {median:.1f}"
                self._reject(each.sample.name, each.key, DumpRejected(told, reason="states-of-another-prompt"))
            else:
                kept.append(each)
        return kept

    def _rechecked(self, judged: list[_Judged], recheck: Recheck, count: int) -> list[_Judged]:
        """Extracts `count` samples, evenly spread, again. One that differs is rejected; when all do, nothing can be adopted."""
        chosen = set(np.linspace(0, len(judged) - 1, min(count, len(judged))).astype(int).tolist())
        differing: set[int] = set()
        for n in sorted(chosen):
            state = judged[n].sample.load()
            told = recheck(judged[n].sample.candidates[judged[n].candidate], state)
            if told is not None:
                differing.add(n)
                self._reject(judged[n].sample.name, judged[n].key, DumpRejected(told, reason="differs-from-engine"))
        if chosen and differing == chosen:
            raise InputError(
                f"all {len(chosen)} samples extracted again differ from {self._extraction.kind}'s: another model or layer set",
                reason="adopt-other-model",
            )
        return [each for n, each in enumerate(judged) if n not in differing]

    def _commit_all(self, judged: list[_Judged]) -> tuple[int, int]:
        adopted = already_there = 0
        for each in judged:
            if each.key in self._store:
                already_there += 1
                continue
            try:
                state = each.sample.load()
                self._store.commit(_as_dump(each, state), each.key, each.sample.candidates[each.candidate], chunk=_ADOPTED_CHUNK)
                adopted += 1
            except DrafterDataError as error:
                self._reject(each.sample.name, each.key, error)
        return adopted, already_there

    def _reject(self, name: str, key: str, error: Exception) -> None:
        reason = error.reason if isinstance(error, DrafterDataError) else "unreadable"
        self._rejected.append(
            Finding(
                reason=reason,
                state_key=key,
                file=name,
                expected="states of its prompt",
                found=str(error)[:300],
                remedy="extract this prompt again",
            )
        )


def _as_dump(judged: _Judged, state: EarlierState) -> ClaimedDump:
    return ClaimedDump(
        request_id=judged.sample.name,
        states_slh=state.states_slh,
        dtype=_known_dtype(state.dtype),
        token_ids_s=state.token_ids_s,
        proof="adopted",
        proof_error=None,
        entries=(),
    )


def identity_for(extraction: EarlierExtraction, model: Checkpoint, layers: Sequence[int] | None) -> StoreIdentity:
    """The identity of the store that an extraction belongs to; its dtype is that of most of its first samples.

    Raises InputError when nothing can be read.
    """
    dtypes: Counter[str] = Counter()
    for _, sample in zip(range(16), extraction.samples(), strict=False):
        try:
            dtypes[sample.load().dtype] += 1
        except (DrafterDataError, OSError):
            continue
    if not dtypes:
        raise InputError("none of the first samples can be read; nothing to adopt", reason="adopt-nothing")
    return StoreIdentity(
        weights_digest=model.weights_digest(),
        quantisation=model.quantisation,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        layers=tuple(layers) if layers else default_layers(model.num_layers),
        final_norm=extraction.final_norm,
        dtype=_known_dtype(dtypes.most_common(1)[0][0]),
    )


def _known_dtype(name: str) -> StateDtype:
    if name not in ("F32", "F16", "BF16"):
        raise DumpRejected(f"expected states in F32, F16 or BF16, found {name}", reason="dtype")
    return name
