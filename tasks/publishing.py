"""What every task shares: no result cache (receipts and records on disk are the truth), and tables for the UI."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging import get_run_logger

STAGE: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False}
"""A stage finds out for itself what is done: a cached result is no proof that its files are still there."""


def say(message: str) -> None:
    """One line in the log of the run, or of the process where there is no run."""
    run_logger().info(message)


def run_logger() -> logging.Logger | logging.LoggerAdapter[Any]:
    """The logger of the running flow or task; it may be used from other threads."""
    inside = FlowRunContext.get() or TaskRunContext.get()
    return get_run_logger() if inside else logging.getLogger("drafter_data")


def publish_table(key: str, description: str, rows: Sequence[Mapping[str, object]]) -> None:
    """A table artifact; `rows` share their columns. Cells that JSON does not know become text."""
    cells = [{name: value if isinstance(value, (int, float)) else str(value) for name, value in row.items()} for row in rows]
    create_table_artifact(key=key, table=cells, description=description)


def publish_facts(key: str, description: str, facts: Mapping[str, object]) -> None:
    """A table artifact of two columns: what, and how much."""
    publish_table(key, description, [{"what": name, "value": value} for name, value in facts.items()])
