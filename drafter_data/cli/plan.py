"""`drafter-data plan`: which chunk brings which states."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from data_contracts.plan import Plan
from drafter_data.cli.output import print_json, print_table
from drafter_data.costs import CostModel, latest_costs
from drafter_data.dataset import Dataset
from drafter_data.planning import make_plan
from drafter_data.store.store import Store


def plan(
    dataset: Path,
    *,
    store: Path,
    chunk_samples: Annotated[int, Parameter(validator=Number(gte=1))] = 200,
    max_prompt_tokens: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    json: bool = False,
) -> None:
    """Cut what a store lacks of a dataset into chunks of about equal predicted cost; a plan that is there is kept.

    Example: `drafter-data plan .demo/dataset --store .demo/store --chunk-samples 200`

    Parameters
    ----------
    dataset
        Folder of the dataset.
    store
        Folder of the store.
    chunk_samples
        Samples a chunk, about.
    max_prompt_tokens
        Longest prompt that the engine takes; longer rows are listed as excluded. Default: the dataset's longest row.
    json
        Print the plan as JSON.
    """
    data, opened = Dataset.open(dataset), Store.open(store)
    limit = max_prompt_tokens if max_prompt_tokens is not None else data.record.longest_tokens
    costs = latest_costs(opened.root) or CostModel()
    made = make_plan(data, opened, costs, chunk_samples=chunk_samples, max_prompt_tokens=limit)
    opened.close()
    if json:
        print_json(made)
    else:
        _print(made)


def _print(plan: Plan) -> None:
    samples, tokens = sum(chunk.samples for chunk in plan.chunks), sum(chunk.tokens for chunk in plan.chunks)
    seconds = [chunk.predicted_seconds for chunk in plan.chunks]
    columns = ("chunks", "samples", "tokens", "predicted s a chunk", "already stored", "excluded")
    spread = f"{min(seconds):.1f}-{max(seconds):.1f}" if seconds else "-"
    row = (len(plan.chunks), samples, tokens, spread, plan.already_stored, len(plan.excluded))
    print_table(plan.dataset_id, columns, [row])
