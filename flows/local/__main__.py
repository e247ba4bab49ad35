"""`python -m flows.local demo|up|down`: what the Makefile calls."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from rich.console import Console

from drafter_data.errors import DrafterDataError
from flows.local.demo import run_demo
from flows.local.services import CHECKOUT, Services


def main() -> int:
    """Exit 0 done, 1 failed, 2 bad usage; one clear line for what we know to go wrong."""
    parser = argparse.ArgumentParser(prog="python -m flows.local")
    parser.add_argument("command", choices=("demo", "up", "down"))
    parser.add_argument("--port", type=int, default=4200)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    console = Console()
    signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        if given.command == "demo":
            return run_demo((given.folder or CHECKOUT / ".demo").absolute(), console)
        services = Services((given.folder or CHECKOUT / ".run").absolute() / "prefect", given.port)
        return up(services, console) if given.command == "up" else down(services, console)
    except DrafterDataError as error:
        Console(stderr=True).print(f"{error.reason}: {error}", markup=False, highlight=False, soft_wrap=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def up(services: Services, console: Console) -> int:
    """Server, worker and deployments, left running."""
    if services.running():
        services = services.as_started()
        console.print("already running")
    else:
        services.start(lambda what: console.print(f"[dim]{what}"))
    console.print(
        f"Prefect UI   {services.url}\n"
        f"Logs         {services.folder}\n"
        f"Next         PREFECT_API_URL={services.api} .venv/bin/prefect deployment run extract-100k\n"
        "             or Deployments > extract-100k > Run in the UI, with your runs, engine and trainer in its form\n"
        "Stop         make down",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return 0


def down(services: Services, console: Console) -> int:
    """Ends what `up` started, by its record."""
    stopped = services.stop()
    console.print(f"stopped: {', '.join(stopped)}" if stopped else "nothing was running", highlight=False)
    return 0


def _as_interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
