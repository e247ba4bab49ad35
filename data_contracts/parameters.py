"""Flow parameters: bounded and described, so that they become the form in the Prefect UI.

Order of the fields is the order in the form.
"""

from __future__ import annotations

from copy import copy
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from data_contracts.identity import FinalNorm

EngineKind = Literal["embedded", "sglang", "sglang-unlabelled", "vllm"]
DumpFolderMode = Literal["exclusive", "shared"]


class Parameters(BaseModel):
    """Base of the form sections: closed to unknown fields, since a misspelt one would silently keep its default."""

    model_config = ConfigDict(extra="forbid", frozen=True)


ReadRole = Literal["system", "developer", "user", "assistant", "tool", "call"]
"""Roles that turns are read as; `call` is an assistant turn whose text is the JSON of its tool calls."""


class MergeParameters(Parameters):
    """Which rows a dataset holds and what of them is supervised. The merge command fills the same record from its flags."""

    over_long: Literal["drop", "cut"] = Field(
        default="drop",
        title="Rows above the longest",
        description="`drop` them, or `cut` ids and mask together to the limit minus (hash of the row modulo 256).",
    )
    supervise_reasoning: bool = Field(
        default=True, title="Supervise reasoning", description="Off: an answer's reasoning stays in the row, out of the loss mask."
    )
    supervise_tool_calls: bool = Field(
        default=True, title="Supervise tool calls", description="Off: an answer's calls stay in the row, out of the loss mask."
    )
    last_turn_only: bool = Field(
        default=False, title="Last answer only", description="Supervise the last answer of a conversation alone."
    )
    roles: dict[str, ReadRole] = Field(
        default_factory=dict[str, ReadRole],
        title="Further roles",
        description='Added to the role map, for example {"narrator": "system"}. A role that it does not name drops the row.',
    )
    special_text: Literal["drop", "keep"] = Field(
        default="drop",
        title="Rows that spell a control token",
        description="`drop` them, or `keep` them as an engine would read them.",
    )
    vocab_size: int | None = Field(
        default=None,
        ge=1,
        le=2**31,
        title="Vocabulary size",
        description="Tokenised rows with an id that is not below it are dropped. Empty: any id.",
    )
    max_dropped_share: float = Field(
        default=0.5,
        ge=0,
        le=1,
        title="Largest share of faulty rows",
        description="A run above it stops the merge. Over-long rows, repeats and rows without a supervised token do not count.",
    )
    sample_rows: int | None = Field(
        default=None, ge=1, le=10**12, title="Row budget", description="Keep a seeded sample of this many rows. Empty: all."
    )
    sample_tokens: int | None = Field(
        default=None, ge=1, le=10**15, title="Token budget", description="Keep a seeded sample of at most this many tokens."
    )
    sample_seed: int = Field(default=0, ge=0, le=2**63 - 1, title="Seed of the sample", description="Another seed, other rows.")
    template_time: datetime | None = Field(
        default=None,
        title="Time for the template",
        description="What a chat template that writes the date is told. Empty: the time of the merge.",
    )
    trust_remote_code: bool = Field(
        default=False,
        title="Run the tokenizer's code",
        description="Runs Python that comes in the tokenizer's folder (Kimi's tokenizer is such code): read it first.",
    )
    workers: int | None = Field(
        default=None, ge=1, le=256, title="Reading processes", description="Empty: one a CPU, at most 8, for large input."
    )


TokenizerName = Annotated[
    str, Field(title="Tokenizer", description="`builtin`, or a local Hugging Face tokenizer folder (extra `tokenize`).")
]
LongestRow = Annotated[
    int | None,
    Field(
        ge=2,
        le=10_000_000,
        title="Longest row (tokens)",
        description="Longer rows are dropped (or cut, below). Empty: the engine's limit.",
    ),
]
Merging = Annotated[MergeParameters, Field(title="Merge", description="Which rows are kept and what of them is supervised.")]


class InputParameters(Parameters):
    """Generation runs and how they become rows."""

    runs: tuple[str, ...] = Field(
        default=(),
        title="Generation runs",
        description="Files or folders (JSONL, JSON, Parquet). Empty: sample runs are generated.",
    )
    sample_count: int = Field(
        default=300,
        ge=10,
        le=100_000,
        title="Samples to generate",
        description="Only when no generation runs are given.",
    )
    seed: int = Field(default=0, ge=0, title="Seed", description="For sample runs and re-extracted samples.")
    tokenizer: TokenizerName = "builtin"
    max_tokens: LongestRow = None
    merge: Merging = MergeParameters()


class EngineParameters(Parameters):
    """The inference server and where it dumps."""

    kind: EngineKind = Field(
        default="embedded", title="Engine", description="`embedded` needs no GPU and no model: it makes a small one."
    )
    url: str | None = Field(
        default=None,
        title="URL",
        description="For example http://127.0.0.1:30000. Empty: the flow starts the engine and stops it.",
    )
    model: str | None = Field(
        default=None, title="Model folder", description="Hugging Face checkpoint of the verifier (config, safetensors)."
    )
    dump_folder: str | None = Field(
        default=None,
        title="Dump folder",
        description="Where the engine writes its dumps, usually below /dev/shm. Ours, mode 0700.",
    )
    dump_folder_mode: DumpFolderMode = Field(
        default="exclusive",
        title="Dump folder use",
        description="`exclusive` sweeps strays older than 60 s; `shared` touches nothing of others.",
    )
    layers: tuple[int, ...] | None = Field(
        default=None,
        title="Layers",
        description="Hugging Face indices, the final one last. Empty: 2, n/2, n-3 and n, as EAGLE-3 uses.",
    )
    final_norm: FinalNorm = Field(
        default="pre", title="Final state", description="`pre` the final norm (speculators) or `post` it (older dumps)."
    )
    launch_flags: tuple[str, ...] = Field(
        default=(),
        title="Launch flags",
        description="Added when the flow starts the engine itself, one argument a line.",
    )


def _as_engine(name: str) -> Any:
    """The field of EngineParameters, so that both forms say the same."""
    return copy(EngineParameters.model_fields[name])


class ChunkEngineParameters(Parameters):
    """The engine of a chunk, as far as it is the same on all hosts: URL and dump folder are each host's own."""

    kind: EngineKind = _as_engine("kind")
    model: str | None = _as_engine("model")
    dump_folder_mode: DumpFolderMode = _as_engine("dump_folder_mode")
    layers: tuple[int, ...] | None = _as_engine("layers")
    final_norm: FinalNorm = _as_engine("final_norm")
    launch_flags: tuple[str, ...] = _as_engine("launch_flags")

    @classmethod
    def of(cls, engine: EngineParameters) -> ChunkEngineParameters:
        """What a run tells the hosts of its engine."""
        return cls.model_validate(engine.model_dump(include=set(cls.model_fields)))


class ExtractionParameters(Parameters):
    """How chunks are cut, sent, retried and judged."""

    in_flight: int = Field(
        default=64, ge=1, le=512, title="Requests in flight", description="At most; the run finds how many within it are fastest."
    )
    chunk_samples: int = Field(
        default=200, ge=1, le=10_000, title="Samples a chunk", description="About; chunks have equal predicted cost."
    )
    attempts: int = Field(default=3, ge=1, le=10, title="Attempts a sample", description="A 4xx answer is never tried again.")
    quarantine_attempts: int = Field(
        default=0,
        ge=0,
        le=1_000,
        title="Quarantine after attempts",
        description="Counted over all runs; then a sample is no longer tried. 0: never.",
    )
    chunk_retries: int = Field(
        default=1, ge=0, le=10, title="Retries a chunk", description="By Prefect, when a chunk as a whole fails."
    )
    request_timeout_seconds: float = Field(
        default=600, ge=1, le=86_400, title="Time limit a request (s)", description="From sending to the engine's reply."
    )
    dump_timeout_seconds: float = Field(
        default=60, ge=0.1, le=3_600, title="Time limit a dump (s)", description="From the reply to a complete dump."
    )
    recheck_samples: int = Field(
        default=1, ge=0, le=100, title="Samples extracted again a chunk", description="And compared within tolerance."
    )
    max_error_rate: float = Field(
        default=0.0, ge=0, le=1, title="Largest share of failed samples", description="Above it there is no hand-off."
    )
    stop_after_failures: int = Field(
        default=20,
        ge=1,
        le=100_000,
        title="Stop after failures in a row",
        description="Then the engine is at fault, not the samples.",
    )
    fan_out: Literal["tasks", "deployment"] = Field(
        default="tasks",
        title="Fan out",
        description="`tasks`: in this process. `deployment`: runs of extract-chunk on other hosts.",
    )


class HandoffParameters(Parameters):
    """The trainer and its job."""

    trainer: Literal["ridge", "speculators", "specforge"] = Field(
        default="ridge", title="Trainer", description="`ridge` ships with the base install and ends in a real result."
    )
    launch: bool = Field(default=True, title="Start the training job", description="Off: the hand-off table shows its command.")
    deployment: str = Field(
        default="",
        title="Training deployment",
        description="`flow/deployment`, such as train/train, whose run trains elsewhere: it is given `handoff` (the folder) and "
        "`command`. Empty: the job starts on this host, behind the option `submit` (such as `sbatch --wait --wrap`) if set.",
    )
    validation_share: float = Field(
        default=0.1, ge=0, le=0.5, title="Held-out share", description="Of the prompts, chosen by a hash of their content."
    )
    options: dict[str, str] = Field(default_factory=dict, title="Trainer options", description="Passed to the trainer's command.")


class StorageParameters(Parameters):
    """Where results live."""

    folder: str = Field(
        default=".run/data",
        title="Work folder",
        description="Holds datasets/, handoffs/ and, unless set below, store/; `dataset` and `handoff` in it link to the latest.",
    )
    store: str | None = Field(
        default=None, title="Store", description="Shared by all datasets of one model. Empty: <work folder>/store."
    )
    keep_free_gb: float = Field(
        default=1.0, ge=0, le=100_000, title="Keep free (GB)", description="Extraction stops, resumable, below this."
    )


class WatchParameters(Parameters):
    """Where generation runs arrive, when one counts as finished, and how it becomes rows."""

    runs: tuple[str, ...] = Field(
        default=(),
        title="Folders of runs",
        description="A folder (whose files and folders are runs) or a URL pattern (its matches). Empty: runs/ of the work folder.",
    )
    marker: str = Field(
        default="_SUCCESS",
        min_length=1,
        max_length=100,
        pattern="^[^/]+$",
        title="Marker file",
        description="In a run's folder, or beside a file as <file>.<marker>: the run is finished.",
    )
    settled_minutes: float | None = Field(
        default=10.0,
        ge=0,
        le=100_000,
        title="Settled after (minutes)",
        description="Without a marker a run is finished when nothing in it changed for so long. Empty: only the marker counts.",
    )
    tokenizer: TokenizerName = "builtin"
    max_tokens: LongestRow = None
    merge: Merging = MergeParameters()
    hand_off: Literal["grown", "delta"] = Field(
        default="grown",
        title="Hand off",
        description="`grown`: the whole new version. `delta`: only the rows that no earlier night handed off.",
    )

    def merging(self, runs: tuple[str, ...]) -> InputParameters:
        """The merge's parameters for the runs that were found."""
        return InputParameters(runs=runs, tokenizer=self.tokenizer, max_tokens=self.max_tokens, merge=self.merge)


class ChunkParameters(Parameters):
    """Which chunk of which kept plan; paths as the host that runs it sees them."""

    dataset: str = Field(title="Dataset", description="Folder of the dataset.")
    store: str = Field(title="Store", description="Folder of the store, which keeps the plan.")
    index: int = Field(default=0, ge=0, title="Chunk", description="Its index in the plan.")
    keep_free_gb: float = Field(
        default=1.0, ge=0, le=100_000, title="Keep free (GB)", description="Extraction stops, resumable, below this."
    )
