"""The other side: `datasets` in the steps of speculators' data preparation, as of version 0.9 (load, shuffle, map, shuffle, save).

Run as `python peer.py prepare-data|lean tokenised|conversations INPUT OUT TOKENIZER PROCESSES`. The rows that it writes are the
same as ours: ids and loss mask (from the template's generation marks), without repeats being looked for.

`prepare-data` takes the steps as they are there: rows as torch tensors of 64-bit integers, results kept in memory, shuffled before
and after, saved by one process. `lean` leaves all of that out and loads, maps and saves with all processes: the least that
`datasets` can be asked to do. Only the rendering differs from the original in both: there a vLLM server renders each answer of a
conversation over HTTP, here the tokenizer renders the conversation once.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
_tokenizers: dict[str, Any] = {}


def prepare_tokenised(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Checks lengths and adds `seq_len`, as a preparation of tokenised rows must."""
    kept = [i for i, ids in enumerate(batch["input_ids"]) if len(ids) == len(batch["loss_mask"][i]) and any(batch["loss_mask"][i])]
    ids = [batch["input_ids"][i] for i in kept]
    return {"input_ids": ids, "loss_mask": [batch["loss_mask"][i] for i in kept], "seq_len": [len(row) for row in ids]}


def prepare_conversations(batch: dict[str, list[Any]], folder: str) -> dict[str, list[Any]]:
    """Chat template, ids and assistant mask, one conversation at a time, as speculators does it."""
    if folder not in _tokenizers:
        from transformers import AutoTokenizer

        _tokenizers[folder] = AutoTokenizer.from_pretrained(folder)
    out: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "seq_len": []}
    for messages in batch["messages"]:
        encoded = _tokenizers[folder].apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        out["input_ids"].append(encoded["input_ids"])
        out["loss_mask"].append(encoded["assistant_masks"])
        out["seq_len"].append(len(encoded["input_ids"]))
    return out


def as_tensors(batch: dict[str, list[Any]], prepare: Any) -> dict[str, list[Any]]:
    """The prepared rows as torch tensors."""
    import torch

    out = prepare(batch)
    for name in ("input_ids", "loss_mask"):
        out[name] = [torch.tensor(row, dtype=torch.long) for row in out[name]]
    return out


def main(way: str, kind: str, source: str, out: str, folder: str, processes: str) -> None:
    """Loads, maps and saves."""
    import datasets

    count, lean = int(processes), way == "lean"
    prepare = prepare_tokenised if kind == "tokenised" else partial(prepare_conversations, folder=folder)
    options: dict[str, Any] = {"num_proc": count} if lean else {}
    rows = datasets.load_dataset("json", data_files=source, split="train", cache_dir=f"{out}.cache", **options)
    if lean:
        mapped = rows.map(prepare, batched=True, num_proc=count, remove_columns=rows.column_names, load_from_cache_file=False)
        mapped.save_to_disk(out, num_proc=count)
        return
    mapped = rows.shuffle(seed=0).map(
        as_tensors,
        fn_kwargs={"prepare": prepare},
        batched=True,
        num_proc=count,
        batch_size=1000,
        remove_columns=rows.column_names,
        keep_in_memory=True,
    )
    mapped.set_format(type="torch")
    datasets.concatenate_datasets([mapped]).shuffle(seed=0).save_to_disk(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
