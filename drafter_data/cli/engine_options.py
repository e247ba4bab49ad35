"""Options of every command that talks to an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from data_contracts.identity import FinalNorm
from data_contracts.parameters import EngineParameters


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The engine and where it dumps."""

    url: Annotated[str, Parameter(help="The engine, for example http://127.0.0.1:30000.")]
    kind: Annotated[
        Literal["embedded", "sglang", "sglang-unlabelled", "vllm"], Parameter(help="embedded and sglang dumps carry labels.")
    ] = "sglang"
    model: Annotated[Path | None, Parameter(help="Checkpoint folder of the verifier; the engine's own by default.")] = None
    dump_folder: Annotated[Path | None, Parameter(help="Where the engine dumps; the folder that it names by default.")] = None
    layers: Annotated[
        tuple[int, ...] | None,
        Parameter(help="Hugging Face indices, the final one last; the engine's by default.", consume_multiple=True),
    ] = None
    final_norm: Annotated[FinalNorm, Parameter(help="Final state before (pre) or after (post) the final norm.")] = "pre"

    def parameters(self) -> EngineParameters:
        """The same as flow parameters."""
        return EngineParameters(
            kind=self.kind,
            url=self.url,
            model=str(self.model) if self.model else None,
            dump_folder=str(self.dump_folder) if self.dump_folder else None,
            layers=self.layers,
            final_norm=self.final_norm,
        )
