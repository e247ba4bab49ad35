"""Sample runs: shaped like real ones, the same for a seed, and read by the merge without a loss."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from drafter_data.embedded.generate import generate
from drafter_data.embedded.llama import Llama
from drafter_data.embedded.sample_runs import plain_text_tokens, write_sample_runs
from drafter_data.errors import InputError
from drafter_data.runs.merge import merge_runs
from drafter_data.tokenising.builtin import IM_END, IM_START, BuiltinTokenizer


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> list[Path]:
    return write_sample_runs(tmp_path_factory.mktemp("runs"), samples=40, seed=3, model=checkpoint)


def test_sample_runs_hold_conversations_and_tokenised_rows_within_the_limit(runs: list[Path]) -> None:
    short = [json.loads(line) for line in runs[0].read_text().splitlines()]
    long = pq.read_table(runs[1]).to_pydict()
    assert len(short) + len(long["id"]) == 40
    assert all([turn["role"] for turn in row["messages"]] == ["user", "assistant"] for row in short)
    assert all(turn["content"].isascii() and turn["content"] for row in short for turn in row["messages"])
    lengths = [len(ids) for ids in long["input_ids"]]
    assert 2047 >= max(lengths) > 600
    assert np.median(lengths) > 250
    for ids, mask in zip(long["input_ids"], long["loss_mask"], strict=True):
        assert len(ids) == len(mask)
        assert ids[0] == IM_START
        assert ids[np.flatnonzero(mask)[-1]] == IM_END
        assert 8 < sum(mask) < len(ids)
        assert np.all(np.diff(np.flatnonzero(mask)) == 1)


def test_sample_runs_merge_drops_only_the_repeats(runs: list[Path], tmp_path: Path) -> None:
    record = merge_runs([str(path) for path in runs], tmp_path / "dataset", max_tokens=2047)
    dropped = [sum(report.dropped.values()) for report in record.runs]
    assert sum(report.read for report in record.runs) == 40
    assert record.rows == 40 - sum(dropped)
    assert sum(dropped) == 2, "one in each run; that of the long run repeats a row of the short one"
    assert {reason for report in record.runs for reason in report.dropped} == {"repeat"}


def test_sample_runs_same_seed_same_rows_and_other_runs_refused(runs: list[Path], tmp_path: Path, checkpoint: Path) -> None:
    again = write_sample_runs(tmp_path / "again", samples=40, seed=3, model=checkpoint)
    assert again[0].read_bytes() == runs[0].read_bytes()
    assert pq.read_table(again[1]).equals(pq.read_table(runs[1]))
    before = again[1].stat().st_mtime_ns
    write_sample_runs(tmp_path / "again", samples=40, seed=3, model=checkpoint)
    assert again[1].stat().st_mtime_ns == before
    with pytest.raises(InputError, match="holds other runs"):
        write_sample_runs(tmp_path / "again", samples=40, seed=4, model=checkpoint)


def test_sample_runs_are_not_degenerate_loops(runs: list[Path]) -> None:
    long = pq.read_table(runs[1]).to_pydict()
    for ids, mask in zip(long["input_ids"], long["loss_mask"], strict=True):
        answer = np.array(ids)[np.array(mask) == 1]
        counts = np.bincount(answer)
        assert counts.max() <= max(4, 0.2 * len(answer))


def test_generate_batched_agrees_with_one_forward_pass_each(model: Llama) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 1024, n).tolist() for n in (1, 40, 7, 90, 3)]
    wanted = [20, 3, 33, 1, 12]
    # At a temperature this low the likeliest token always wins, and can be found by prefilling again.
    answers = generate(model, prompts, wanted, allowed_v=np.ones(1024, bool), temperature=1e-4, rng=rng)
    assert [len(answer) for answer in answers] == wanted
    for prompt, answer in zip(prompts, answers, strict=True):
        logits_sv = model.logits(model.forward(np.array(prompt + answer[:-1]), [8])[:, 0])
        assert logits_sv[len(prompt) - 1 :].argmax(axis=1).tolist() == answer


def test_plain_text_tokens_are_printable_and_no_specials() -> None:
    tokenizer = BuiltinTokenizer()
    allowed = np.flatnonzero(plain_text_tokens(tokenizer))
    assert len(allowed) > 700
    assert tokenizer.decode(allowed.tolist()).isascii()
    assert not set(allowed.tolist()) & {0, 1, 2, IM_START, IM_END}
