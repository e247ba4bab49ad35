"""Reading a Hugging Face checkpoint folder without torch: configuration, weights digest, single tensors.

Tensor legend: V vocabulary, H hidden size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from drafter_data.errors import InputError
from drafter_data.safetensors_file import MalformedFile, TensorFile, as_float32

_INDEX = "model.safetensors.index.json"
_LM_HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")
_EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
)
_NORM_NAMES = ("model.norm.weight", "language_model.model.norm.weight", "model.language_model.norm.weight")
_LFS_POINTER = b"version https://git-lfs"
_NORM_ONE_PLUS_WEIGHT = ("gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_next", "qwen3_5", "qwen3_5_text")
"""Model types whose final RMS norm multiplies by (1 + weight); read from their modelling code in transformers."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder. `text_config` is the language model's part, nested or not."""

    folder: Path
    config: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Opens a folder with config.json and safetensors weights. Raises InputError when one is missing or malformed."""
        checkpoint = cls.of_config(folder)
        checkpoint.weight_files()
        return checkpoint

    @classmethod
    def of_config(cls, folder: Path) -> Checkpoint:
        """A checkpoint of which only config.json need be there. Raises InputError when it is missing or malformed."""
        config_path = folder / "config.json"
        try:
            config = json.loads(config_path.read_bytes())
        except FileNotFoundError as error:
            raise InputError(
                f"no model at {folder}: expected config.json in it, found none; name a Hugging Face checkpoint folder",
                reason="model-missing",
            ) from error
        except (OSError, ValueError) as error:
            raise InputError(
                f"{config_path} cannot be read as JSON: {error}; name a checkpoint folder, or restore it",
                reason="model-config-invalid",
            ) from error
        if not isinstance(config, dict) or not isinstance(config.get("text_config", {}), dict):
            raise InputError(f"{config_path}: expected a JSON object; restore the checkpoint", reason="model-config-invalid")
        checkpoint = cls(folder, cast("dict[str, Any]", config))
        _ = checkpoint.num_layers, checkpoint.hidden_size  # refused here, not where the first reader needs them
        return checkpoint

    @property
    def text_config(self) -> dict[str, Any]:
        """Configuration of the language model (multimodal checkpoints nest it)."""
        return self.config.get("text_config", self.config)

    @property
    def num_layers(self) -> int:
        """Decoder layers n: `hidden_states[n]` is the final state."""
        return self._size("num_hidden_layers")

    @property
    def hidden_size(self) -> int:
        """H."""
        return self._size("hidden_size")

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._size("vocab_size")

    def _size(self, name: str) -> int:
        found = self.text_config.get(name)
        if not isinstance(found, int) or found < 1:
            raise InputError(
                f"{self.folder / 'config.json'}: expected {name}, a positive whole number, found {found!r}; restore the checkpoint",
                reason="model-config-invalid",
            )
        return found

    @property
    def quantisation(self) -> str | None:
        """Quantisation method as config.json names it, None for unquantised weights."""
        found = self.config.get("quantization_config") or self.text_config.get("quantization_config")
        return None if not found else str(found.get("quant_method") or found.get("format") or "unknown")

    @property
    def rms_norm_eps(self) -> float:
        """Epsilon of the final RMS norm."""
        return float(self.text_config.get("rms_norm_eps", 1e-6))

    def weight_files(self) -> list[Path]:
        """All weight files, sorted by name. Raises InputError when there is none, or the index cannot be read."""
        index = self.folder / _INDEX
        if index.is_file():
            files = [self.folder / name for name in _indexed_names(index)]
        else:
            files = sorted(self.folder.glob("*.safetensors"))
        missing = [file.name for file in files if not file.is_file()]
        if missing or not files:
            raise InputError(
                f"{self.folder}: expected safetensors weights, missing {', '.join(missing) or 'all'}; download the whole "
                "checkpoint",
                reason="model-weights-missing",
            )
        return files

    def weights_digest(self) -> str:
        """blake2b-160 hex over the index, and of each weight file its name, size and header (reading all would take minutes)."""
        digest = hashlib.blake2b(b"weights1", digest_size=20)
        index = self.folder / _INDEX
        if index.is_file():
            digest.update(hashlib.blake2b(index.read_bytes(), digest_size=20).digest())
        for path in self.weight_files():
            with _open_weights(path) as file:
                digest.update(f"{path.name}:{path.stat().st_size}:".encode() + file.header_json)
        return digest.hexdigest()

    def tensor(self, *names: str) -> NDArray[np.float32]:
        """The first of `names` that the checkpoint has, as float32. Raises InputError when it has none of them."""
        with self._open(names) as (file, name):
            return np.array(as_float32(file.array(name), file.tensors[name].dtype))

    @contextmanager
    def _open(self, names: tuple[str, ...]) -> Generator[tuple[TensorFile, str]]:
        for path in self.weight_files():
            with _open_weights(path) as file:
                for name in names:
                    if name in file.tensors:
                        yield file, name
                        return
        raise InputError(f"{self.folder}: none of {', '.join(names)} in its weights", reason="model-tensor-missing")

    @property
    def _head_names(self) -> tuple[str, ...]:
        tied = self.config.get("tie_word_embeddings", self.text_config.get("tie_word_embeddings", False))
        return _EMBEDDING_NAMES if tied else _LM_HEAD_NAMES

    def lm_head_vh(self) -> NDArray[np.float32]:
        """Output projection [V, H]; the embeddings where they are tied."""
        return self.tensor(*self._head_names)

    def lm_head_rows(self) -> Callable[[Sequence[int]], NDArray[np.float32]]:
        """A reader of single rows [K, H] of the output projection: the matrix of a large model is mapped, never loaded."""
        with self._open(self._head_names) as (file, name):
            raw_vh, dtype = file.array(name), file.tensors[name].dtype
        return lambda ids: as_float32(raw_vh[list(ids)], dtype)

    def embeddings_vh(self) -> NDArray[np.float32]:
        """Input embeddings [V, H]."""
        return self.tensor(*_EMBEDDING_NAMES)

    def final_norm_weight(self) -> NDArray[np.float32]:
        """The stored weight [H] of the final norm."""
        return self.tensor(*_NORM_NAMES)

    def final_norm(self) -> RmsNorm:
        """The model's own final norm."""
        weight_h = self.final_norm_weight()
        one_plus = str(self.text_config.get("model_type", "")) in _NORM_ONE_PLUS_WEIGHT
        return RmsNorm(1 + weight_h if one_plus else weight_h, self.rms_norm_eps)


def _indexed_names(index: Path) -> list[str]:
    try:
        names: set[str] = {Path(name).name for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"{index}: expected a JSON object with a weight_map of file names, found something else ({type(error).__name__}: "
            f"{error}); download the checkpoint again",
            reason="model-weights-invalid",
        ) from error
    return sorted(names)


def _open_weights(path: Path) -> TensorFile:
    try:
        return TensorFile.open(path)
    except MalformedFile as error:
        with path.open("rb") as handle:
            pointer = handle.read(len(_LFS_POINTER)) == _LFS_POINTER
        told = f"{path} is a Git LFS pointer, no weights; run git lfs pull there" if pointer else f"{error}; download it again"
        raise InputError(told, reason="model-weights-invalid") from error
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror}; restore the checkpoint", reason="model-weights-invalid"
        ) from error


@dataclass(frozen=True)
class RmsNorm:
    """y = x / sqrt(mean(x^2) + eps) * scale, in float32 (Zhang and Sennrich 2019)."""

    scale_h: NDArray[np.float32]
    eps: float

    def __call__(self, states_sh: NDArray[np.float32]) -> NDArray[np.float32]:
        mean_square = np.mean(np.square(states_sh, dtype=np.float32), axis=-1, keepdims=True)
        return (states_sh / np.sqrt(mean_square + np.float32(self.eps)) * self.scale_h).astype(np.float32)


def default_layers(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's aux layers [2, n//2, n-3] and the final one, as Hugging Face indices.

    Raises InputError where they coincide: a model that shallow needs explicit layers.
    """
    layers = (2, num_layers // 2, num_layers - 3, num_layers)
    if list(layers) != sorted(set(layers)):
        raise InputError(
            f"the default layers {layers} coincide or fall out of order for a model of {num_layers} layers; name the layers",
            reason="layers-coincide",
        )
    return layers
