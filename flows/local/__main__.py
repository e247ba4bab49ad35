"""`python -m flows.local demo|up|down`: what the Makefile calls."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from rich.console import Console

from drafter_data.cli.output import width_of
from drafter_data.errors import DrafterDataError
from drafter_data.files import write_atomic
from flows.local.demo import run_demo
from flows.local.services import CHECKOUT, Services

DOTENV = CHECKOUT / ".env"
DOTENV_MARK = "# written by `make up`, removed by `make down`"


def main() -> int:
    """Exit 0 done, 1 failed, 2 bad usage; one clear line for what we know to go wrong."""
    parser = argparse.ArgumentParser(prog="python -m flows.local")
    parser.add_argument("command", choices=("demo", "up", "down"))
    parser.add_argument("--port", type=int, default=4200)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    console = Console(width=width_of(sys.stdout))
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
    if services.healthy():
        services = services.as_started()
        console.print("already running")
    else:
        services.stop()  # half of it may be left of a crash
        services.start(lambda what: console.print(f"[dim]{what}"))
    prefix = "" if point_checkout_at(services) else f"PREFECT_API_URL={services.api} "
    console.print(
        f"Prefect UI   {services.url}\n"
        f"Logs         {services.folder}\n"
        f"Next         {prefix}.venv/bin/prefect deployment run extract-100k\n"
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
    if _is_ours(DOTENV):
        DOTENV.unlink()
    console.print(f"stopped: {', '.join(stopped)}" if stopped else "nothing was running", highlight=False)
    return 0


def point_checkout_at(services: Services) -> bool:
    """Lets Prefect's commands in the checkout find this server, by the `.env` that Prefect reads; one of the user's own is kept."""
    if os.environ.get("PREFECT_API_URL") or (DOTENV.exists() and not _is_ours(DOTENV)):
        return False
    write_atomic(DOTENV, f"{DOTENV_MARK}\nPREFECT_API_URL={services.api}\n")
    return True


def _is_ours(dotenv: Path) -> bool:
    return dotenv.is_file() and dotenv.read_text().startswith(DOTENV_MARK)


def _as_interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
