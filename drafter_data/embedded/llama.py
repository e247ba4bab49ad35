"""A Llama forward pass in NumPy, float32 throughout.

Sources: Touvron et al. 2023 (RMSNorm, SwiGLU), Su et al. 2021 (RoPE), Ainslie et al. 2023 (grouped queries); weight names and the
half-split rotation are those of Hugging Face's `LlamaForCausalLM`.

Tensor legend: S tokens of this call, T keys so far, H hidden, V vocabulary, I MLP width, N query heads, K key/value heads, G = N/K,
D head size, L stored layers. A trailing `_t` marks a weight transposed for `x @ w`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drafter_data.checkpoints import Checkpoint, RmsNorm
from drafter_data.embedded.config import LlamaConfig
from drafter_data.errors import InputError
from drafter_data.safetensors_file import TensorFile, decode_bf16

Array = NDArray[np.float32]
_SCORES_PER_BLOCK = 1 << 18
_MLP_ROWS = 256
_SAFE_EXPONENT = 60.0
"""Scores this small need no maximum subtracted before exp: e^60 summed over millions of keys stays below float32's e^88."""


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; the weights of its two norms and the 1/sqrt(D) of attention are folded into the projections."""

    qkv_t: Array
    out_t: Array
    gate_t: Array
    up_t: Array
    down_t: Array


class KeyValueCache:
    """Keys [K, T, D] and values [K, T, D+1] of each layer. The values' last column is 1: P @ V then also sums the weights."""

    def __init__(self, config: LlamaConfig, capacity: int) -> None:
        kv, dim = config.num_kv_heads, config.head_dim
        self.length = 0
        self.keys = [np.empty((kv, capacity, dim), np.float32) for _ in range(config.num_layers)]
        self.values = [np.ones((kv, capacity, dim + 1), np.float32) for _ in range(config.num_layers)]

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return self.keys[0].shape[1]


class Llama:
    """A loaded model. Read-only after loading: any number of threads may call it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = LlamaConfig.of(checkpoint)
        tensors = _load_all(checkpoint)
        vocabulary = (self.config.vocab_size, self.config.hidden_size)
        self.embeddings_vh = _take(checkpoint, tensors, "model.embed_tokens.weight", vocabulary)
        self.final_norm: RmsNorm = checkpoint.final_norm()
        self.lm_head_t = np.ascontiguousarray(checkpoint.lm_head_vh().T)
        self.layers = [self._layer(checkpoint, tensors, index) for index in range(self.config.num_layers)]
        self._cos, self._sin = _rope_tables(self.config.inverse_frequencies, min(self.config.max_positions, 4096))

    @classmethod
    def load(cls, folder: Path) -> Llama:
        """Loads a checkpoint folder (fp32, fp16 or bf16 weights). Raises InputError when it is missing, cut or unsupported."""
        return cls(Checkpoint.open(folder))

    def _layer(self, checkpoint: Checkpoint, tensors: dict[str, Array], index: int) -> LayerWeights:
        def weight(name: str, *shape: int) -> Array:
            return _take(checkpoint, tensors, f"model.layers.{index}.{name}.weight", shape)

        config = self.config
        hidden, width = config.hidden_size, config.intermediate_size
        query_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        scale = np.float32(config.head_dim**-0.5)
        before_attention, before_mlp = weight("input_layernorm", hidden), weight("post_attention_layernorm", hidden)
        query = weight("self_attn.q_proj", query_width, hidden)
        key, value = (weight(f"self_attn.{name}_proj", kv_width, hidden) for name in "kv")
        return LayerWeights(
            qkv_t=np.ascontiguousarray((np.concatenate([query * scale, key, value]) * before_attention).T),
            out_t=np.ascontiguousarray(weight("self_attn.o_proj", hidden, query_width).T),
            gate_t=np.ascontiguousarray((weight("mlp.gate_proj", width, hidden) * before_mlp).T),
            up_t=np.ascontiguousarray((weight("mlp.up_proj", width, hidden) * before_mlp).T),
            down_t=np.ascontiguousarray(weight("mlp.down_proj", hidden, width).T),
        )

    def cache(self, capacity: int) -> KeyValueCache:
        """An empty cache for up to `capacity` tokens."""
        return KeyValueCache(self.config, capacity)

    def forward(self, token_ids_s: NDArray[np.int64], layers: Sequence[int], cache: KeyValueCache | None = None) -> Array:
        """States [S, len(layers), H] of the tokens that follow those in `cache`; index n is the final state, PRE-norm.

        `layers` are Hugging Face indices (0 = embeddings). The cache is filled and advanced. The same tokens, cut into the same
        calls, give the same bits. Raises ValueError for an id outside the vocabulary or more tokens than the cache holds.
        """
        length = len(token_ids_s)
        cache = cache or self.cache(length)
        if length == 0 or cache.length + length > cache.capacity:
            raise ValueError(f"{length} tokens on top of {cache.length} do not fit a cache of {cache.capacity}")
        if int(token_ids_s.min()) < 0 or int(token_ids_s.max()) >= self.config.vocab_size:
            raise ValueError(f"token ids outside 0..{self.config.vocab_size - 1}")
        rope = self.rope(np.arange(cache.length, cache.length + length))
        hidden_sh = self.embeddings_vh[token_ids_s]
        states_slh = np.empty((length, len(layers), self.config.hidden_size), np.float32)
        for depth in range(self.config.num_layers + 1):
            for column in (column for column, wanted in enumerate(layers) if wanted == depth):
                states_slh[:, column] = hidden_sh
            if depth < self.config.num_layers:
                self._attend(hidden_sh, self.layers[depth], rope, depth, cache)
                self.feed_forward(hidden_sh, self.layers[depth])
        cache.length += length
        return states_slh

    def logits(self, final_sh: Array) -> Array:
        """Logits [S, V] of PRE-norm final states [S, H]."""
        return self.final_norm(final_sh) @ self.lm_head_t

    def rope(self, positions_s: NDArray[np.int64]) -> tuple[Array, Array]:
        """Cosines and sines [S, 1, D/2] of the rotation at these positions."""
        end = int(positions_s.max()) + 1
        if end > len(self._cos):
            self._cos, self._sin = _rope_tables(self.config.inverse_frequencies, 2 * end)
        return self._cos[positions_s, None], self._sin[positions_s, None]

    def _attend(self, hidden_sh: Array, layer: LayerWeights, rope: tuple[Array, Array], depth: int, cache: KeyValueCache) -> None:
        """Adds attention's output to the residual stream, in place."""
        config, length, past = self.config, len(hidden_sh), cache.length
        heads, kv, dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv_snd = (self.normed(hidden_sh) @ layer.qkv_t).reshape(length, heads + 2 * kv, dim)
        rotated_snd = rotate(qkv_snd[:, : heads + kv], *rope)
        total = past + length
        cache.keys[depth][:, past:total] = rotated_snd[:, heads:].transpose(1, 0, 2)
        cache.values[depth][:, past:total, :dim] = qkv_snd[:, heads + kv :].transpose(1, 0, 2)
        queries_kgsd = np.ascontiguousarray(rotated_snd[:, :heads].reshape(length, kv, heads // kv, dim).transpose(1, 2, 0, 3))
        mixed_snd = attention(queries_kgsd, cache.keys[depth][:, :total], cache.values[depth][:, :total])
        hidden_sh += mixed_snd.reshape(length, heads * dim) @ layer.out_t

    def feed_forward(self, hidden_sh: Array, layer: LayerWeights) -> None:
        """Adds the MLP's output to the residual stream, in place, in blocks of rows so that [S, I] never exists whole."""
        for start in range(0, len(hidden_sh), _MLP_ROWS):
            block_sh = hidden_sh[start : start + _MLP_ROWS]
            normed_sh = self.normed(block_sh)
            gate_si = normed_sh @ layer.gate_t
            up_si = normed_sh @ layer.up_t
            up_si *= gate_si
            np.negative(gate_si, out=gate_si)
            with np.errstate(over="ignore"):  # exp overflows to inf where silu is 0, which is what the division gives
                np.exp(gate_si, out=gate_si)
            gate_si += 1
            up_si /= gate_si
            block_sh += up_si @ layer.down_t

    def normed(self, hidden_sh: Array) -> Array:
        """RMS norm without its weight, which is folded into the projection that follows."""
        mean_square_s = np.einsum("sh,sh->s", hidden_sh, hidden_sh) / np.float32(self.config.hidden_size)
        return hidden_sh * (1 / np.sqrt(mean_square_s + np.float32(self.config.rms_norm_eps)))[:, None]


def attention(queries_kgsd: Array, keys_ktd: Array, values_kte: Array) -> Array:
    """Causal attention [S, K, G, D] of queries that are the last S of T positions; E = D+1, see `KeyValueCache`.

    Queries go in blocks which see keys up to their own end, so memory stays bounded and half of the work is left out.
    """
    kv, group, length, dim = queries_kgsd.shape
    total = keys_ktd.shape[1]
    past = total - length
    keys_kdt = keys_ktd.transpose(0, 2, 1)
    small = _largest_norm(queries_kgsd) * _largest_norm(keys_ktd) < _SAFE_EXPONENT
    mixed_skgd = np.empty((length, kv, group, dim), np.float32)
    rows = int(np.clip(_SCORES_PER_BLOCK // (kv * group * total), 1, 128))
    for start in range(0, length, rows):
        end = min(start + rows, length)
        seen = past + end
        block_kqd = queries_kgsd[:, :, start:end].reshape(kv, group * (end - start), dim)
        scores_kqt = block_kqd @ keys_kdt[:, :, :seen]
        scores_kgst = scores_kqt.reshape(kv, group, end - start, seen)
        if end - start > 1:
            scores_kgst[..., past + start :] += _causal(end - start)
        if not small:
            scores_kqt -= scores_kqt.max(axis=-1, keepdims=True)
        np.exp(scores_kqt, out=scores_kqt)
        mixed_kqe = scores_kqt @ values_kte[:, :seen]
        mixed_kqd = mixed_kqe[..., :dim] / mixed_kqe[..., dim:]
        mixed_skgd[start:end] = mixed_kqd.reshape(kv, group, end - start, dim).transpose(2, 0, 1, 3)
    return mixed_skgd


_CAUSAL = np.triu(np.full((128, 128), -np.inf, np.float32), 1)


def _causal(rows: int) -> Array:
    return _CAUSAL[:rows, :rows]


def _largest_norm(vectors: Array) -> float:
    return float(np.sqrt(np.einsum("...d,...d->...", vectors, vectors).max()))


def rotate(heads_snd: Array, cos_s1d: Array, sin_s1d: Array) -> Array:
    """RoPE: the first and second half of a head are the two coordinates of each rotation."""
    half = heads_snd.shape[-1] // 2
    first, second = heads_snd[..., :half], heads_snd[..., half:]
    rotated = np.empty_like(heads_snd)
    np.subtract(first * cos_s1d, second * sin_s1d, out=rotated[..., :half])
    np.add(second * cos_s1d, first * sin_s1d, out=rotated[..., half:])
    return rotated


def _rope_tables(inverse_frequencies: Sequence[float], positions: int) -> tuple[Array, Array]:
    angles = np.outer(np.arange(positions, dtype=np.float64), np.asarray(inverse_frequencies))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _load_all(checkpoint: Checkpoint) -> dict[str, Array]:
    """All tensors as float32, each weight file opened once."""
    tensors: dict[str, Array] = {}
    for path in checkpoint.weight_files():
        with TensorFile.open(path) as file:
            for name, entry in file.tensors.items():
                if entry.dtype not in ("F32", "F16", "BF16"):
                    raise InputError(
                        f"{path}: {name} is {entry.dtype}; the embedded engine reads F32, F16 and BF16", reason="model-unsupported"
                    )
                raw: NDArray[Any] = file.array(name)
                tensors[name] = decode_bf16(raw) if entry.dtype == "BF16" else np.array(raw, dtype=np.float32)
    return tensors


def _take(checkpoint: Checkpoint, tensors: dict[str, Array], name: str, shape: tuple[int, ...]) -> Array:
    if name not in tensors:
        raise InputError(
            f"{checkpoint.folder}: no {name} in its weights; expected a Llama checkpoint", reason="model-tensor-missing"
        )
    if tensors[name].shape != shape:
        raise InputError(
            f"{checkpoint.folder}: {name} is of shape {tensors[name].shape}, expected {shape} by its config.json; "
            "restore the checkpoint",
            reason="model-config-invalid",
        )
    return tensors[name]
