"""`make demo`: the main job through a real server, worker and deployment, from sample runs to a trained drafter."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from drafter_data.cli.output import table_of
from drafter_data.embedded.launch import free_port
from flows.local.following import artifact, follow, send
from flows.local.services import CHECKOUT, Services

SAMPLES = 300
CHUNK_SAMPLES = 50
TIMEOUT_SECONDS = 600.0
DEPLOYMENT = "extract-100k"


def run_demo(folder: Path, console: Console) -> int:
    """Runs the main job in `folder`; returns 0 only when the flow run completed. Everything that was started is ended."""
    services = Services(folder / "prefect", free_port())
    services.stop()  # what a killed demo left
    started = time.monotonic()
    try:
        services.start(lambda what: console.print(f"[dim]{what}"))
        console.print(f"Prefect UI while this runs: {services.url}")
        console.print(f"[bold]prefect deployment run {DEPLOYMENT}[/]")
        run_id = send(services, DEPLOYMENT, demo_parameters(folder))
        run = follow(
            services,
            run_id,
            lambda line: console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True),
            timeout_seconds=TIMEOUT_SECONDS,
        )
        result = artifact(services, run_id, "hand-off")
        completed = run["state_type"] == "COMPLETED"
        if completed and result is not None:
            console.print(summary(result["rows"], time.monotonic() - started))
            say_where(folder, console)
        else:
            console.print(f"[bold red]{run['state_name']}[/]: {escape(str(run['state']['message']))}")
        return 0 if completed else 1
    finally:
        services.stop()


def demo_parameters(folder: Path) -> dict[str, Any]:
    """Sample runs, the embedded engine, several chunks."""
    return {
        "input": {"sample_count": SAMPLES},
        "extraction": {"chunk_samples": CHUNK_SAMPLES},
        "storage": {"folder": str(folder), "keep_free_gb": 0.1},
    }


def summary(rows: list[dict[str, Any]], seconds: float) -> Table:
    """The hand-off's facts for the terminal."""
    title = f"From sample runs to a trained drafter in {seconds:.0f} s"
    return table_of(title, ("what", "value"), [(row["what"], _short(str(row["value"]))) for row in rows])


def say_where(folder: Path, console: Console) -> None:
    """Where to look, and what to do next."""
    shown = _short(str(folder))
    console.print(
        f"\nLook at   {shown}/dataset  {shown}/store  {shown}/handoff\n"
        f"Check     .venv/bin/drafter-data validate {shown}/store --dataset {shown}/dataset\n"
        f"          .venv/bin/drafter-data status {shown}/store\n"
        "Next      make up    (the Prefect UI, to run it on your own generation runs and engine)",
        highlight=False,
        markup=False,
    )


def _short(text: str) -> str:
    return text.replace(f"{CHECKOUT}/", "")
