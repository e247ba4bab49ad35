"""The store's own distribution of signatures, and what it says about one sample.

Layers: the L(L+1)/2 sizes and distances of a sample are compared with those of other samples by their Mahalanobis distance, so that
what varies in common (the tokens of a prompt) does not hide what does not (the ratio of two layers). A sample that is far off is
explained by the hypothesis under which it is not: another order of its layers, a transposed layout, one layer of another size.
Tokens: the projected first layer's rows are compared with the mean of the same token's rows in other samples.

Tensor legend: N samples, F features, L stored layers, R rows, P projected size, B token buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drafter_data.foreign_file import RowsOnDisk
from drafter_data.safetensors_file import as_float32
from drafter_data.validation.signature import PROJECTED, Doubles, Floats, Signature, shape_of, signature_of

FEWEST_SAMPLES = 64
SAMPLES = 512
BUCKETS = 1 << 13
FEWEST_OF_A_TOKEN = 4
FEWEST_TOKENS = 12
FAR = 6.0
"""Mahalanobis distance squared a feature: for ten features a good sample passes this once in 10^8; see `LayerReference.learn`."""
BETTER, UNEXPLAINED = 3.0, 2.0
CONSTANT_SPREAD, SCALED_SPREAD = 0.8, 0.6
"""Share of the usual variation below which a size counts as constant; the second where a mere factor would explain it too."""
ALIGNED_SHARE = 0.25
"""Of the usual alignment. Of 200 samples of a tiny Llama short good ones go down to 0.34, those of other tokens up to 0.12."""
ALIGNMENT_TELLS = 0.2
OFFSETS = (-2, -1, 1, 2)


@dataclass(frozen=True)
class Verdict:
    """What is wrong with a sample's content, in the terms of a finding."""

    reason: str
    expected: str
    found: str


@dataclass(frozen=True)
class LayerReference:
    """Centre [F] and inverse covariance [F, F] of the shapes; `half_rows` is where more rows stop adding certainty."""

    centre_f: Doubles
    covariance_ff: Doubles
    spread_l: Doubles
    half_rows: float
    limit: float

    @classmethod
    def learn(cls, signatures: Sequence[Signature]) -> LayerReference:
        """From samples most of which are good. The limit is raised where this store's good samples vary more than normally."""
        features_nf = np.stack([_features(signature.shape_ll) for signature in signatures])
        rows_n = np.array([len(signature.rows_r) for signature in signatures], dtype=np.float64)
        centre_f = np.median(features_nf, axis=0)
        best: tuple[float, LayerReference] | None = None
        for half_rows in (np.inf, 4096.0, 1024.0, 256.0, 64.0, 16.0, 4.0) if np.ptp(rows_n) else (np.inf,):
            scaled_nf = (features_nf - centre_f) * np.sqrt(_certainty(rows_n, half_rows))[:, None]
            covariance_ff, distance_n, kept_n = trimmed_covariance(scaled_nf)
            trend = _trend(distance_n[kept_n], rows_n[kept_n])
            limit = max(FAR, 2 * float(np.quantile(distance_n[kept_n], 0.99)))
            spread_l = np.median([signature.spread_l for signature in signatures], axis=0)
            if best is None or trend < best[0] - 0.02:
                best = (trend, cls(centre_f, covariance_ff, spread_l, half_rows, limit))
        assert best is not None
        return best[1]

    def distance(self, shape_ll: Doubles, rows: int, features: Sequence[int] | None = None) -> float:
        """Mahalanobis distance squared a feature of a shape measured over `rows` rows; of some features only, if given."""
        error_f = (_features(shape_ll) - self.centre_f) * float(np.sqrt(_certainty(rows, self.half_rows)))
        if features is None:
            return float(error_f @ self.precision_ff @ error_f) / len(error_f)
        chosen = np.asarray(features)
        return float(error_f[chosen] @ np.linalg.solve(self.covariance_ff[np.ix_(chosen, chosen)], error_f[chosen])) / len(chosen)

    @cached_property
    def precision_ff(self) -> Doubles:
        """The inverse covariance."""
        return np.asarray(np.linalg.inv(self.covariance_ff), dtype=np.float64)

    def fits(self, shape_ll: Doubles, rows: int, features: Sequence[int] | None = None) -> bool:
        """Whether a shape is one of this store's."""
        return self.distance(shape_ll, rows, features) <= self.limit


@dataclass(frozen=True)
class TokenReference:
    """Mean projected row of each token bucket, [2, B, P], learnt on two halves of the samples, and how often it was seen [2, B]."""

    mean_2bp: Floats
    count_2b: NDArray[np.int64]
    typical: float

    @classmethod
    def learn(cls, samples: Sequence[tuple[Signature, NDArray[np.int64]]]) -> TokenReference:
        """Each half is judged by the other, so that no sample vouches for itself."""
        sum_2bp = np.zeros((2, BUCKETS, PROJECTED), dtype=np.float32)
        count_2b = np.zeros((2, BUCKETS), dtype=np.int64)
        for index, (signature, ids_s) in enumerate(samples):
            bucket_r = ids_s[signature.rows_r] % BUCKETS
            np.add.at(sum_2bp[index % 2], bucket_r, signature.tokens_rp)
            count_2b[index % 2] += np.bincount(bucket_r, minlength=BUCKETS)
        overall_p = sum_2bp.sum(axis=(0, 1)) / max(int(count_2b.sum()), 1)
        mean_2bp = sum_2bp / np.maximum(count_2b, 1)[:, :, None] - overall_p
        mean_2bp /= np.linalg.norm(mean_2bp, axis=2, keepdims=True) + np.float32(1e-30)
        untested = cls(mean_2bp, count_2b, 0.0)
        scores = (untested.alignment(signature, ids_s, half=1 - k % 2) for k, (signature, ids_s) in enumerate(samples))
        known = [score for score in scores if score is not None]
        return cls(mean_2bp, count_2b, float(np.median(known)) if len(known) >= FEWEST_SAMPLES // 2 else 0.0)

    def alignment(self, signature: Signature, ids_s: NDArray[np.int64], *, half: int, offset: int = 0) -> float | None:
        """Mean cosine of rows and what their tokens (moved by `offset`) look like elsewhere; None where too few are known."""
        at_r = signature.rows_r + offset
        inside_r = (at_r >= 0) & (at_r < len(ids_s))
        bucket_r = ids_s[at_r[inside_r]] % BUCKETS
        known_r = self.count_2b[half, bucket_r] >= FEWEST_OF_A_TOKEN
        if int(known_r.sum()) < FEWEST_TOKENS:
            return None
        rows_rp = signature.tokens_rp[inside_r][known_r]
        return float(np.einsum("rp,rp->r", rows_rp, self.mean_2bp[half, bucket_r[known_r]]).mean())

    def judge(self, signature: Signature, ids_s: NDArray[np.int64]) -> Verdict | None:
        """Whether the rows are those of these tokens. Says nothing where tokens leave too little trace to tell."""
        if self.typical < ALIGNMENT_TELLS:
            return None
        scores = [self.alignment(signature, ids_s, half=half) for half in (0, 1)]
        known = [score for score in scores if score is not None]
        if not known or max(known) >= ALIGNED_SHARE * self.typical:
            return None
        expected = f"rows that follow their tokens as elsewhere in the store ({self.typical:.2f})"
        moved = {offset: self.alignment(signature, ids_s, half=0, offset=offset) or 0.0 for offset in OFFSETS}
        best = max(moved, key=moved.__getitem__)
        if moved[best] >= ALIGNED_SHARE * self.typical:
            return Verdict("rows-shifted", expected, f"rows that follow the tokens {best:+d} places on ({moved[best]:.2f})")
        return Verdict("another-prompt", expected, f"rows of other tokens ({max(known):.2f})")


@dataclass(frozen=True)
class Reference:
    """What good samples of a store look like. `layers` are their Hugging Face indices."""

    layers: tuple[int, ...]
    shapes: LayerReference
    tokens: TokenReference

    @classmethod
    def learn(cls, layers: tuple[int, ...], samples: Sequence[tuple[Signature, NDArray[np.int64]]]) -> Reference | None:
        """From signatures and token ids of samples; None where there are too few (64, and four a feature) to tell."""
        features = len(layers) * (len(layers) + 1) // 2
        if len(samples) < max(FEWEST_SAMPLES, 4 * features):
            return None
        return cls(layers, LayerReference.learn([signature for signature, _ in samples]), TokenReference.learn(samples))

    def fits(self, signature: Signature, ids_s: NDArray[np.int64]) -> bool:
        """Whether there is nothing to look into."""
        return self.shapes.fits(signature.shape_ll, len(signature.rows_r)) and self.tokens.judge(signature, ids_s) is None

    def judge(
        self, signature: Signature, states_slh: NDArray[Any] | RowsOnDisk, dtype: str, ids_s: NDArray[np.int64]
    ) -> Verdict | None:
        """What is wrong with the content of a sample with this signature, or None."""
        if not self.shapes.fits(signature.shape_ll, len(signature.rows_r)):
            return self._explain(states_slh, dtype, signature)
        return self.tokens.judge(signature, ids_s)

    def _explain(self, states_slh: NDArray[Any] | RowsOnDisk, dtype: str, signature: Signature) -> Verdict | None:
        rows, shape_ll = len(signature.rows_r), signature.shape_ll
        distance = self.shapes.distance(shape_ll, rows)
        expected = f"layers {', '.join(map(str, self.layers))} as elsewhere in the store"
        orders = [list(order) for order in permutations(range(len(self.layers)))]
        best = min(orders, key=lambda order: self.shapes.distance(shape_ll[np.ix_(order, order)], rows))
        if self._explains(shape_ll[np.ix_(best, best)], rows, distance):
            found = [self.layers[best.index(place)] for place in range(len(best))]
            return Verdict("layers-swapped", expected, f"the states of layers {', '.join(map(str, found))}, in this order")
        for name, layout_slh in _other_layouts(states_slh):
            if self._explains(signature_of(layout_slh, dtype).shape_ll, rows, distance):
                return Verdict("layout", "states laid out as [tokens, layers, hidden]", f"states laid out as {name}")
        for place in range(len(self.layers)):
            if self._explains(shape_ll, rows, distance, _features_without(len(self.layers), place)):
                return self._one_layer(states_slh, dtype, signature, place)
        # Without an explanation it may be a good sample of a rare kind: much more is asked for.
        if distance < UNEXPLAINED * self.shapes.limit:
            return None
        return Verdict("layers-unlike", expected, f"sizes and distances {distance:.0f} times the usual misfit: other layers?")

    def _explains(self, shape_ll: Doubles, rows: int, distance: float, features: Sequence[int] | None = None) -> bool:
        """Whether a sample that is `distance` off fits well under a hypothesis."""
        return self.shapes.distance(shape_ll, rows, features) <= min(self.shapes.limit, distance / BETTER)

    def _one_layer(self, states_slh: NDArray[Any] | RowsOnDisk, dtype: str, signature: Signature, place: int) -> Verdict:
        """All layers but one are as they should be: that one is scaled, has passed the norm, or is another layer."""
        layer, final = self.layers[place], place == len(self.layers) - 1
        off_l = (signature.shape_ll - _matrix(self.shapes.centre_f, len(self.layers))).diagonal()
        ratio = float(np.exp(off_l[place] - np.median(np.delete(off_l, place))))
        found = f"{ratio:.3g} times as large"
        scaled_rlh = as_float32(states_slh[signature.rows_r], dtype)
        scaled_rlh[:, place] /= ratio
        scaled = self.shapes.fits(shape_of(scaled_rlh), len(signature.rows_r))
        spread, usual = signature.spread_l[place], self.shapes.spread_l[place]
        if final and spread < (SCALED_SPREAD if scaled else CONSTANT_SPREAD) * usual:
            return Verdict(
                "final-norm",
                f"a final state whose size varies from token to token as elsewhere in the store (by {usual:.3f})",
                f"one of nearly constant size ({spread:.3f}), as after the final norm",
            )
        if scaled:
            return Verdict("layer-scale", f"layer {layer} as large against the others as elsewhere in the store", found)
        return Verdict("layers-unlike", f"states of layer {layer}", f"states of another layer, {found}")


def _other_layouts(states_slh: NDArray[Any] | RowsOnDisk) -> list[tuple[str, NDArray[Any]]]:
    tokens, layers, hidden = states_slh.shape
    flat = np.ascontiguousarray(states_slh)
    return [
        ("[layers, tokens, hidden]", flat.reshape(layers, tokens, hidden).transpose(1, 0, 2)),
        ("[tokens, hidden, layers]", flat.reshape(tokens, hidden, layers).transpose(0, 2, 1)),
    ]


def _features(shape_ll: Doubles) -> Doubles:
    """The upper triangle of a shape, diagonal included, [F]."""
    return shape_ll[_triangle(len(shape_ll))]


@lru_cache(maxsize=8)
def _triangle(layers: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.triu_indices(layers)


def _matrix(features_f: Doubles, layers: int) -> Doubles:
    """A shape from its features."""
    shape_ll = np.zeros((layers, layers))
    shape_ll[np.triu_indices(layers)] = features_f
    return shape_ll + np.triu(shape_ll, 1).T


def _features_without(layers: int, place: int) -> list[int]:
    a, b = np.triu_indices(layers)
    return [int(k) for k in np.flatnonzero((a != place) & (b != place))]


def _trend(distance_n: Doubles, rows_n: Doubles) -> float:
    """How strongly distances go with the number of rows (0 to 1); 0 where that is one number throughout."""
    if np.ptp(rows_n) == 0 or np.ptp(distance_n) == 0:
        return 0.0
    return abs(float(np.corrcoef(np.log(distance_n + 1e-9), np.log(rows_n + 1))[0, 1]))


def _certainty(rows: Any, half_rows: float) -> Any:
    """Rows of one sample are alike: beyond `half_rows` more of them say little more about the sample's place in the store."""
    return rows if np.isinf(half_rows) else rows * half_rows / (rows + half_rows)


def trimmed_covariance(scaled_nf: Doubles) -> tuple[Doubles, Doubles, NDArray[np.bool_]]:
    """(covariance, distance squared a feature of each sample, kept samples); far ones are left out (Rousseeuw, Driessen 1999)."""
    features = scaled_nf.shape[1]
    spread_f = 1.4826 * np.median(np.abs(scaled_nf), axis=0) + 1e-9
    distance_n = np.mean(np.square(scaled_nf / spread_f), axis=1)
    covariance_ff = np.diag(spread_f**2)
    kept_n = np.ones(len(scaled_nf), dtype=bool)
    for _ in range(4):
        kept_n = distance_n <= 6 * np.median(distance_n)
        kept_nf = scaled_nf[kept_n]
        covariance_ff = kept_nf.T @ kept_nf / len(kept_nf) + 1e-10 * np.eye(features)
        distance_n = np.einsum("nf,fn->n", scaled_nf, np.linalg.solve(covariance_ff, scaled_nf.T)) / features
    return covariance_ff, distance_n, kept_n
