"""The dataset card of a hand-off: README.md in Hugging Face form, with pictures of lengths and sources (SVG, drawn here)."""

from __future__ import annotations

from collections import Counter
from html import escape
from pathlib import Path

import numpy as np

from data_contracts.handoff import HandoffManifest
from drafter_data.dataset import Dataset
from drafter_data.files import write_atomic
from drafter_data.trainers.selection import Selection

CARD_FILE = "README.md"
_BARS = 24
_SIZE_CATEGORIES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))


def write_card(folder: Path, manifest: HandoffManifest, dataset: Dataset, selection: Selection) -> None:
    """Writes README.md, lengths.svg and sources.svg into a hand-off folder that is being built."""
    runs_of_rows = dataset.columns("run").column(0).to_pylist()
    sources = Counter(runs_of_rows[row.row] for row in selection.rows)
    lengths = np.array([row.num_tokens for row in selection.rows])
    counts, edges = np.histogram(lengths, bins=min(_BARS, len(np.unique(lengths))))
    bars = [(f"{int(low)}-{int(high)}", int(count)) for low, high, count in zip(edges, edges[1:], counts, strict=False)]
    write_atomic(folder / "lengths.svg", bar_picture("Samples by tokens", bars))
    write_atomic(folder / "sources.svg", bar_picture("Samples by generation run", sources.most_common(_BARS)))
    quantiles = np.quantile(lengths, (0.1, 0.5, 0.9, 0.99)).astype(int).tolist()
    write_atomic(folder / CARD_FILE, _card(manifest, dataset, sources, quantiles))


def bar_picture(title: str, bars: list[tuple[str, int]]) -> str:
    """Horizontal bars with their labels and counts, as SVG."""
    largest = max((count for _, count in bars), default=1) or 1
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="640" height="{40 + 18 * len(bars)}"',
        ' font-family="sans-serif" font-size="12">',
        f'<text x="8" y="20" font-size="14">{escape(title)}</text>',
    ]
    for k, (label, count) in enumerate(bars):
        y = 34 + 18 * k
        width = 400 * count / largest
        lines.append(f'<text x="150" y="{y + 12}" text-anchor="end">{escape(label[-24:])}</text>')
        lines.append(f'<rect x="158" y="{y}" width="{width:.1f}" height="14" fill="#4878a8"/>')
        lines.append(f'<text x="{164 + width:.1f}" y="{y + 12}">{count:,}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _card(manifest: HandoffManifest, dataset: Dataset, sources: Counter[str], quantiles: list[int]) -> str:
    identity, record, name = manifest.identity, dataset.record, Path(manifest.model).name
    size = next((category for limit, category in _SIZE_CATEGORIES if manifest.samples < limit), "1M<n<10M")
    excluded = Counter(exclusion.reason for exclusion in manifest.exclusions)
    recovered = manifest.options.get("recover_pre_norm") == "true"
    p10, p50, p90, p99 = quantiles
    facts = {
        "dataset": manifest.dataset_id,
        "samples": f"{manifest.samples:,} ({manifest.train_samples:,} to train on, {manifest.validation_samples:,} held out)",
        "tokens": f"{manifest.tokens:,}, supervised {manifest.supervised_tokens:,} "
        f"({manifest.supervised_tokens / manifest.tokens:.0%})",
        "tokens a sample": f"10 % below {p10:,}, half below {p50:,}, 90 % below {p90:,}, 99 % below {p99:,}, "
        f"longest {manifest.longest_tokens:,}",
        "states": f"{manifest.bytes / 1e9:.2f} GB, {identity.dtype}, [tokens, {len(identity.layers)}, {identity.hidden_size}]",
        "layers (Hugging Face)": f"{', '.join(map(str, identity.layers))} of {identity.num_layers}; the last one "
        f"{'before the norm again, as post / scale' if recovered else f'{identity.final_norm} the final norm'}",
        "verifier": f"{name}, weights {identity.weights_digest}, quantisation {identity.quantisation or 'none'}",
        "tokenizer": f"{record.tokenizer}, {record.tokenizer_hash}; template {record.template_hash}",
        "engine": "; ".join(f"{each.engine} {each.engine_version}" for each in manifest.provenance) or "not recorded",
        "made by": f"drafter-data {manifest.code_version} for {manifest.trainer} {manifest.trainer_version}".rstrip(),
    }
    lines = [
        "---",
        "language: []",
        "tags: [speculative-decoding, eagle3, hidden-states, drafter-data]",
        f"size_categories: [{size}]",
    ]
    lines += [f"pretty_name: Hidden states for an EAGLE-3 drafter of {Path(manifest.model).name}", "---", ""]
    lines += [f"# Hidden states for an EAGLE-3 drafter of {Path(manifest.model).name}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in facts.items()]
    lines += ["", "![Samples by tokens](lengths.svg)", "", "## Sources", "", "| generation run | samples |", "|---|---|"]
    lines += [f"| {_cell(run)} | {count:,} |" for run, count in sources.most_common()]
    lines += ["", "![Samples by generation run](sources.svg)", "", "## Excluded", ""]
    lines += [f"- {reason}: {count:,}" for reason, count in sorted(excluded.items())] or ["Nothing."]
    lines += ["", "`manifest.json` lists all of it with checksums; `drafter-data handoff --check` compares.", ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
