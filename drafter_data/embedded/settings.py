"""What the embedded engine is started with. Names follow SGLang's launch flags where it has the same one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from data_contracts.identity import FinalNorm
from drafter_data.checkpoints import default_layers
from drafter_data.errors import UsageError


def parse_layers(text: str) -> tuple[int, ...]:
    """Comma-separated layer indices. Raises UsageError."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"layers {text!r}: expected comma-separated numbers, for example 2,4,5,8") from None


@dataclass(frozen=True)
class ServerSettings:
    """Launch settings. `chunked_prefill_size` -1 switches chunking off, as in SGLang; `port` 0 takes a free one."""

    dump_folder: Path
    model: Path | None = None
    port: int = 0
    dumps: Literal["labelled", "unlabelled"] = "labelled"
    final_norm: FinalNorm = "pre"
    layers: tuple[int, ...] | None = None
    max_prefill_tokens: int = 8192
    prefill_max_requests: int | None = None
    chunked_prefill_size: int = 8192
    max_running_requests: int = 256
    skip_server_warmup: bool = False
    request_log: Path | None = None
    timed: bool = False
    timed_base_ms: float = 20.0
    timed_us_per_token: float = 25.0
    hidden_size: int = 4096
    num_layers: int = 32
    dtype: Literal["bf16", "fp32"] = "bf16"
    context_length: int = 131_072
    fault: tuple[str, ...] = ()
    faults: Path | None = None

    def __post_init__(self) -> None:
        """Raises UsageError for settings that cannot be served."""
        if self.model is None and not self.timed:
            raise UsageError("the embedded engine needs a model folder (--model DIR), or --timed to answer without computing")
        for name in ("max_prefill_tokens", "max_running_requests", "hidden_size", "num_layers", "context_length"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.prefill_max_requests is not None and self.prefill_max_requests < 1:
            raise UsageError(f"prefill_max_requests is {self.prefill_max_requests}; expected at least 1")
        if self.chunked_prefill_size != -1 and self.chunked_prefill_size < 1:
            raise UsageError(f"chunked_prefill_size is {self.chunked_prefill_size}; expected at least 1, or -1 for no chunking")
        if self.timed_base_ms < 0 or self.timed_us_per_token < 0:
            raise UsageError("timed_base_ms and timed_us_per_token must not be negative")

    def layers_for(self, num_layers: int) -> tuple[int, ...]:
        """The dumped layers of a model of `num_layers`. Raises UsageError unless they ascend, differ and end in the final one."""
        layers = self.layers or default_layers(num_layers)
        if list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] != num_layers or len(layers) < 2:
            raise UsageError(
                f"layers {','.join(map(str, layers))}: expected two or more ascending Hugging Face indices that end in {num_layers}"
            )
        return layers

    def as_flags(self) -> dict[str, Any]:
        """All settings in JSON form, for /server_info."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
