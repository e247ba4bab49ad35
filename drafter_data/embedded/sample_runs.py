"""Two generation runs shaped like real ones, for the demo, tests and benchmarks.

Prompts are English words, answers are sampled from the embedded model itself, so that a drafter has something to learn. Lengths are
log-normal up to the model's limit; about 3 % of the rows repeat another one exactly, within a run or across the two.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from drafter_data.checkpoints import Checkpoint
from drafter_data.embedded.generate import generate
from drafter_data.embedded.llama import Llama
from drafter_data.embedded.prompt_words import prompt_of
from drafter_data.errors import InputError, UsageError
from drafter_data.files import atomic_path
from drafter_data.tokenising.builtin import IM_END, IM_START, SPECIAL_TOKENS, BuiltinTokenizer

SHORT_FILE = "short-prompts.jsonl"
LONG_FILE = "long-prompts.parquet"
TEMPERATURE = 0.8
REPEATED_SHARE = 0.03
LONG_SHARE = 1 / 3
_METADATA_KEY = b"drafter_data.sample_runs"
_SCHEMA = pa.schema([("id", pa.string()), ("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.uint8()))])
_CHARACTERS_PER_TOKEN = 2.5  # of the built-in tokenizer on these prompts
_LEAST_TOKENS = 24


@dataclass(frozen=True)
class _Shape:
    """Whole-row lengths: exp(normal(ln median, sigma)), and the share of a row that is its prompt."""

    median_tokens: int
    sigma: float
    prompt_share: float


_SHORT = _Shape(median_tokens=110, sigma=0.6, prompt_share=0.4)
_LONG = _Shape(median_tokens=420, sigma=0.75, prompt_share=0.75)


@dataclass(frozen=True)
class _Sample:
    """One row: its prompt and the sampled answer's ids."""

    prompt: str
    prompt_ids: list[int]
    answer_ids: list[int]


def write_sample_runs(out: Path, *, samples: int, seed: int, model: Path) -> list[Path]:
    """Writes `short-prompts.jsonl` (conversations) and `long-prompts.parquet` (tokenised rows) into `out` and returns their paths.

    The two hold `samples` rows in all, repeats included. The same samples, seed and model give the same rows on one machine; when
    they are there already they are left alone. Raises UsageError for fewer than 2 samples and InputError for a model of another
    vocabulary than the built-in tokenizer's, or when `out` holds other runs.
    """
    if samples < 2:
        raise UsageError(f"samples: expected at least 2, found {samples}")
    short_path, long_path = out / SHORT_FILE, out / LONG_FILE
    made_from = {"samples": samples, "seed": seed, "model": Checkpoint.open(model).weights_digest()}
    if long_path.exists():  # it is written last
        _check_same(long_path, made_from)
        return [short_path, long_path]
    loaded, tokenizer = Llama.load(model), BuiltinTokenizer()
    if loaded.config.vocab_size != tokenizer.vocab_size:
        raise InputError(
            f"{model}: expected the built-in tokenizer's vocabulary of {tokenizer.vocab_size}, found {loaded.config.vocab_size}; "
            "sample runs need the embedded engine's own checkpoint",
            reason="model-unsupported",
        )
    rng = np.random.default_rng([seed, samples])
    long_count = max(1, round(samples * LONG_SHARE))
    short, long = _sample_rows(loaded, tokenizer, rng, samples - long_count, long_count)
    out.mkdir(parents=True, exist_ok=True)
    _write_short(short_path, tokenizer, _with_repeats(short, samples - long_count, rng))
    _write_long(long_path, tokenizer, _with_repeats(long, long_count, rng), short, rng, made_from)
    return [short_path, long_path]


def _check_same(long_path: Path, made_from: dict[str, Any]) -> None:
    try:
        found = json.loads((pq.read_schema(long_path).metadata or {}).get(_METADATA_KEY, b"null"))
    except (pa.ArrowInvalid, ValueError):
        found = None
    if found != made_from:
        raise InputError(
            f"{long_path.parent} holds other runs (expected {made_from}, found {found}); name another folder",
            reason="output-taken",
        )


def _sample_rows(
    model: Llama, tokenizer: BuiltinTokenizer, rng: np.random.Generator, short_count: int, long_count: int
) -> tuple[list[_Sample], list[_Sample]]:
    """Distinct rows of the two runs; repeats come later."""
    limit = model.config.max_positions - 1
    short_count, long_count = (count - _repeats_of(count) for count in (short_count, long_count))
    totals = [*_lengths(rng, _SHORT, short_count, limit), *_lengths(rng, _LONG, long_count, limit)]
    shapes = [_SHORT] * short_count + [_LONG] * long_count
    prompts = [
        prompt_of(rng, int(total * shape.prompt_share * _CHARACTERS_PER_TOKEN)) for total, shape in zip(totals, shapes, strict=True)
    ]
    prompt_ids = [_prompt_ids(tokenizer, prompt) for prompt in prompts]
    tail = 1 + len(tokenizer.encode("\n"))
    wanted = [min(max(8, total - len(ids) - tail), limit - len(ids) - tail) for total, ids in zip(totals, prompt_ids, strict=True)]
    answers = generate(model, prompt_ids, wanted, allowed_v=plain_text_tokens(tokenizer), temperature=TEMPERATURE, rng=rng)
    rows = [_Sample(*parts) for parts in zip(prompts, prompt_ids, answers, strict=True)]
    return rows[:short_count], rows[short_count:]


def _lengths(rng: np.random.Generator, shape: _Shape, count: int, limit: int) -> list[int]:
    drawn = rng.lognormal(math.log(shape.median_tokens), shape.sigma, count)
    return np.clip(drawn, _LEAST_TOKENS, limit * 0.95).astype(int).tolist()


def _prompt_ids(tokenizer: BuiltinTokenizer, prompt: str) -> list[int]:
    """The user's turn and the head of the answer, as the built-in chat template renders them."""
    user = [IM_START, *tokenizer.encode(f"user\n{prompt}"), IM_END, *tokenizer.encode("\n")]
    return [*user, IM_START, *tokenizer.encode("assistant\n")]


def plain_text_tokens(tokenizer: BuiltinTokenizer) -> NDArray[np.bool_]:
    """Which tokens are printable ASCII or white space throughout: any sequence of them is text that a JSON line can hold."""
    printable = set(range(0x20, 0x7F)) | {0x0A}
    allowed_v = np.array([bool(piece) and set(piece) <= printable for piece in tokenizer.token_bytes])
    allowed_v[: len(SPECIAL_TOKENS)] = False
    return allowed_v


def _repeats_of(count: int) -> int:
    """How many of a run's rows repeat another one; half of the long run's come from the short run."""
    return min(count - 1, max(1, round(count * REPEATED_SHARE))) if count > 4 else 0


def _with_repeats(rows: list[_Sample], count: int, rng: np.random.Generator) -> list[_Sample]:
    """`count` rows: all of `rows`, with repeats of some at places drawn."""
    repeated = list(rows)
    while len(repeated) < count:
        repeated.insert(int(rng.integers(len(repeated) + 1)), rows[int(rng.integers(len(rows)))])
    return repeated


def _write_short(path: Path, tokenizer: BuiltinTokenizer, rows: Sequence[_Sample]) -> None:
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as handle:
        for number, row in enumerate(rows):
            messages = [
                {"role": "user", "content": row.prompt},
                {"role": "assistant", "content": tokenizer.decode(row.answer_ids)},
            ]
            handle.write(json.dumps({"id": f"short-{number:06d}", "messages": messages}) + "\n")


def _write_long(
    path: Path,
    tokenizer: BuiltinTokenizer,
    rows: Sequence[_Sample],
    short: Sequence[_Sample],
    rng: np.random.Generator,
    made_from: dict[str, Any],
) -> None:
    """Tokenised rows. Every second repeat is replaced by a row of the short run, tokenised as a merge will tokenise it."""
    newline = tokenizer.encode("\n")
    seen: set[int] = set()
    columns: dict[str, list[Any]] = {"id": [], "input_ids": [], "loss_mask": []}
    repeats = 0
    for number, row in enumerate(rows):
        prompt_ids, answer_ids = row.prompt_ids, row.answer_ids
        if id(row) in seen:
            repeats += 1
            if repeats % 2:
                other = short[int(rng.integers(len(short)))]
                prompt_ids, answer_ids = _retokenised(tokenizer, other)
        seen.add(id(row))
        columns["id"].append(f"long-{number:06d}")
        columns["input_ids"].append([*prompt_ids, *answer_ids, IM_END, *newline])
        columns["loss_mask"].append([0] * len(prompt_ids) + [1] * (len(answer_ids) + 1) + [0] * len(newline))
    schema = _SCHEMA.with_metadata({_METADATA_KEY: json.dumps(made_from).encode()})
    with atomic_path(path) as temporary:
        pq.write_table(pa.table(columns, schema=schema), temporary, row_group_size=1024)


def _retokenised(tokenizer: BuiltinTokenizer, row: _Sample) -> tuple[list[int], list[int]]:
    """Prompt and answer ids of a conversation's text: sampled ids need not be the ones that the text encodes to."""
    head = _prompt_ids(tokenizer, row.prompt)
    header = tokenizer.encode("assistant\n")
    whole = tokenizer.encode("assistant\n" + tokenizer.decode(row.answer_ids))
    answer = whole[len(header) :]
    if whole[: len(header)] != header:
        # A token spans the header and the answer; the merge supervises it, and so the prompt ends one token sooner.
        shared = next(i for i, (a, b) in enumerate(zip(whole, header, strict=False)) if a != b)
        return [*head[: len(head) - len(header) + shared]], whole[shared:]
    return head, answer
