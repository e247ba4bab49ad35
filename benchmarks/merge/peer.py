"""The other side: `datasets` as speculators' data preparation uses it (load_dataset, map in batches, save_to_disk).

Run as `python peer.py tokenised|conversations INPUT OUT TOKENIZER PROCESSES`. The rows that it writes are the same as ours:
ids and loss mask (from the template's generation marks), without repeats being looked for.
"""

from __future__ import annotations

import os
import sys
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


def main(kind: str, source: str, out: str, folder: str, processes: str) -> None:
    """Loads, maps and saves."""
    import datasets

    count = int(processes)
    rows = datasets.load_dataset("json", data_files=source, split="train", num_proc=count, cache_dir=f"{out}.cache")
    function, arguments = (prepare_tokenised, {}) if kind == "tokenised" else (prepare_conversations, {"folder": folder})
    mapped = rows.map(
        function,
        batched=True,
        batch_size=100,
        num_proc=count,
        remove_columns=rows.column_names,
        load_from_cache_file=False,
        fn_kwargs=arguments,
    )
    mapped.set_format("torch")
    mapped.save_to_disk(out, num_proc=count)


if __name__ == "__main__":
    main(*sys.argv[1:])
