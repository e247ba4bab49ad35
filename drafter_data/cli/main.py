"""Registers the commands, and turns failures into one clear line and an exit status: 0 done, 1 gate or job failed, 2 bad input."""

from __future__ import annotations

import os
import sys

import cyclopts
from pydantic import ValidationError
from rich.console import Console

from drafter_data.cli.disk_errors import disk_error
from drafter_data.errors import DrafterDataError
from drafter_data.version import code_version

app = cyclopts.App(
    name="drafter-data",
    help="Generation runs in, verified hidden states for an EAGLE-3 drafter out. Each stage of the flow, alone.",
    version=code_version,
    result_action="return_value",
)
for _name, _module in {
    "merge": "merge:merge",
    "lengths": "lengths:lengths",
    "preflight": "preflight:preflight",
    "plan": "plan:plan",
    "extract": "extract:extract",
    "validate": "validate:validate",
    "handoff": "handoff:handoff",
    "engine": "engine:app",
    "status": "status:status",
    "fsck": "fsck:fsck",
    "gc": "gc:gc",
    "adopt": "adopt:adopt",
    "sample-runs": "sample_runs:sample_runs",
}.items():
    app.command(f"drafter_data.cli.{_module}", name=_name)


def main(arguments: list[str] | None = None) -> None:
    """The console entry point."""
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Runs one command; returns its exit status. A failure of ours, a bad parameter and what a disk refuses are one line each;
    anything else keeps its traceback: it is a defect.
    """
    try:
        result = app(arguments, exit_on_error=False, error_console=Console(stderr=True))
    except cyclopts.CycloptsError:
        return 2  # cyclopts has said what is wrong
    except DrafterDataError as error:
        return _fail(f"{error.reason}: {error}", error.exit_code)
    except ValidationError as error:
        return _fail(f"bad-usage: {_first_fault(error)}", 2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        told = disk_error(error)
        if told is None:
            raise
        return _fail(*told)
    except KeyboardInterrupt:
        return 130
    return result if isinstance(result, int) else 0


def _fail(line: str, status: int) -> int:
    print(f"drafter-data: {line}", file=sys.stderr)  # noqa: T201 - the one line for people
    return status


def _first_fault(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"])) or error.title
    return f"{where}: {first['msg']}, found {str(first['input'])[:200]!r}; see --help"
