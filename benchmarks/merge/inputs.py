"""Inputs of the merge benchmark, from a seed: tokenised JSONL, and conversations of English text."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

import numpy as np
import orjson


def write_tokenised(path: Path, size_bytes: int, seed: int = 0) -> int:
    """Rows of `id`, `input_ids` (log-normal lengths, median 900, at most 16,384) and `loss_mask`. Returns the rows."""
    random = np.random.default_rng(seed)
    rows = written = 0
    with path.open("wb") as out:
        while written < size_bytes:
            length = min(int(random.lognormal(6.8, 0.9)) + 2, 16_384)
            prompt = int(length * random.uniform(0.2, 0.6))
            ids = random.integers(0, 150_000, length).tolist()
            mask = [0] * prompt + [1] * (length - prompt)
            written += out.write(orjson.dumps({"id": f"r{rows:07d}", "input_ids": ids, "loss_mask": mask}) + b"\n")
            rows += 1
    return rows


def write_many_tokenised(path: Path, size_bytes: int) -> None:
    """As above, for files of many gigabytes: a block of rows over and over, each time with another first id."""
    block_bytes = min(size_bytes, 50_000_000)
    write_tokenised(path, block_bytes)
    block = path.read_bytes()
    with path.open("wb") as out:
        written = number = 0
        while written < size_bytes:
            again = block.replace(b'"id":"', b'"id":"%d-' % number).replace(b'"input_ids":[', b'"input_ids":[%d,' % number)
            written += out.write(again.replace(b'"loss_mask":[', b'"loss_mask":[0,'))
            number += 1


def write_conversations(path: Path, size_bytes: int, seed: int = 0) -> int:
    """Rows of `id` and `messages` (one to three exchanges) made of the standard library's docstrings. Returns the rows."""
    random = np.random.default_rng(seed)
    paragraphs = _paragraphs()
    rows = written = 0
    with path.open("wb") as out:
        while written < size_bytes:
            messages: list[dict[str, str]] = []
            for _ in range(int(random.integers(1, 4))):
                picks = [paragraphs[i] for i in random.integers(0, len(paragraphs), 5)]
                messages.append({"role": "user", "content": picks[0]})
                messages.append({"role": "assistant", "content": "\n\n".join(picks[1:])})
            written += out.write(orjson.dumps({"id": f"c{rows:07d}", "messages": messages}) + b"\n")
            rows += 1
    return rows


def _paragraphs() -> list[str]:
    found: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                found += [part for part in text.split("\n\n") if len(part) > 40]
    return found
