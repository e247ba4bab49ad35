"""Sampling many continuations at once: one decode step of all sequences costs little more than of one.

Unlike the server, which computes each request alone, bits here depend on what is generated together.

Tensor legend: B sequences, T positions, H hidden, V vocabulary, N query heads, K key/value heads, G = N/K, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from drafter_data.embedded.llama import Array, Llama, rotate

_TOGETHER = 64


def generate(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    new_tokens: Sequence[int],
    *,
    allowed_v: NDArray[np.bool_],
    temperature: float,
    rng: np.random.Generator,
) -> list[list[int]]:
    """`new_tokens[i]` sampled ids after `prompts[i]`, from the tokens that `allowed_v` [V] admits.

    The same arguments and generator give the same ids on one machine. Raises ValueError for an empty prompt.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    by_need = sorted(range(len(prompts)), key=lambda i: new_tokens[i])
    for first in range(0, len(prompts), _TOGETHER):
        members = sorted(by_need[first : first + _TOGETHER], key=lambda i: -new_tokens[i])
        batch = _Batch(model, [prompts[i] for i in members], [new_tokens[i] for i in members])
        for member, ids in zip(members, batch.run(allowed_v, temperature, rng), strict=True):
            answers[member] = ids
    return answers


class _Batch:
    """Sequences in descending order of what they still need, so that those at work are always the first ones."""

    def __init__(self, model: Llama, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int]) -> None:
        config = model.config
        self._model = model
        self._needed_b = np.array(new_tokens)
        self._lengths_b = np.array([len(prompt) for prompt in prompts])
        shape, longest = (config.num_layers, len(prompts), config.num_kv_heads), int((self._lengths_b + self._needed_b).max())
        self._keys = np.zeros((*shape, config.head_dim, longest), np.float32)  # positions last: twice as fast to multiply
        self._values = np.zeros((*shape, longest, config.head_dim), np.float32)
        self._final_bh = np.empty((len(prompts), config.hidden_size), np.float32)
        for row, prompt in enumerate(prompts):
            cache = model.cache(len(prompt))
            self._final_bh[row] = model.forward(np.array(prompt, dtype=np.int64), [config.num_layers], cache)[-1, 0]
            for depth in range(config.num_layers):
                self._keys[depth, row, :, :, : len(prompt)] = cache.keys[depth].transpose(0, 2, 1)
                self._values[depth, row, :, : len(prompt)] = cache.values[depth][..., :-1]

    def run(self, allowed_v: NDArray[np.bool_], temperature: float, rng: np.random.Generator) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in self._needed_b]
        final_bh = self._final_bh
        for step in range(int(self._needed_b.max(initial=0))):
            active = int((self._needed_b > step).sum())
            tokens_b = sample(self._model.logits(final_bh[:active]), allowed_v, temperature, rng)
            for answer, token in zip(answers, tokens_b.tolist(), strict=False):
                answer.append(token)
            final_bh = self._step(tokens_b, step)
        return answers

    def _step(self, tokens_b: NDArray[np.int64], step: int) -> Array:
        """Final states [B, H] of one more token a sequence."""
        model, positions_b = self._model, self._lengths_b[: len(tokens_b)] + step
        seen = int(positions_b.max()) + 1
        unseen_bt = np.where(np.arange(seen) > positions_b[:, None], np.float32(-np.inf), np.float32(0))
        rope = model.rope(positions_b)
        hidden_bh = model.embeddings_vh[tokens_b]
        for depth, layer in enumerate(model.layers):
            qkv_bh = model.normed(hidden_bh) @ layer.qkv_t
            hidden_bh += self._attend(depth, qkv_bh, rope, positions_b, unseen_bt) @ layer.out_t
            model.feed_forward(hidden_bh, layer)
        return hidden_bh

    def _attend(
        self, depth: int, qkv_bh: Array, rope: tuple[Array, Array], positions_b: NDArray[np.int64], unseen_bt: Array
    ) -> Array:
        config, (size, seen) = self._model.config, unseen_bt.shape
        heads, kv, dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv_bnd = qkv_bh.reshape(size, heads + 2 * kv, dim)
        rotated_bnd = rotate(qkv_bnd[:, : heads + kv], *rope)
        rows_b = np.arange(size)
        self._keys[depth, rows_b, :, :, positions_b] = rotated_bnd[:, heads:]
        self._values[depth, rows_b, :, positions_b] = qkv_bnd[:, heads + kv :]
        keys_bkdt = self._keys[depth, :size, :, :, :seen]
        scores_bkgt = rotated_bnd[:, :heads].reshape(size, kv, heads // kv, dim) @ keys_bkdt
        scores_bkgt += unseen_bt[:, None, None]
        scores_bkgt -= scores_bkgt.max(axis=-1, keepdims=True)
        np.exp(scores_bkgt, out=scores_bkgt)
        mixed_bkgd = scores_bkgt @ self._values[depth, :size, :, :seen]
        mixed_bkgd /= scores_bkgt.sum(axis=-1, keepdims=True)
        return mixed_bkgd.reshape(size, heads * dim)


def sample(logits_bv: Array, allowed_v: NDArray[np.bool_], temperature: float, rng: np.random.Generator) -> NDArray[np.int64]:
    """One id a row, by inverting the cumulative distribution at one uniform number a row."""
    logits_bv = np.where(allowed_v, logits_bv / np.float32(temperature), np.float32(-np.inf))
    logits_bv -= logits_bv.max(axis=-1, keepdims=True)
    cumulative_bv = np.cumsum(np.exp(logits_bv), axis=-1, dtype=np.float64)
    threshold_b = rng.random(len(logits_bv)) * cumulative_bv[:, -1]
    return (cumulative_bv <= threshold_b[:, None]).sum(axis=-1)
