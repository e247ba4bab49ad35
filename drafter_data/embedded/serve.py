"""The embedded engine's process: arguments, signals, the line that says it is ready."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from drafter_data.embedded.server import EmbeddedServer
from drafter_data.embedded.settings import ServerSettings, parse_layers
from drafter_data.errors import DrafterDataError


def serve(settings: ServerSettings) -> None:
    """Serves until SIGTERM or SIGINT. Prints `ready on URL` once requests are answered. Raises DrafterDataError before that."""
    stopped = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        del number, frame
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    server = EmbeddedServer(settings)
    server.start()
    print(f"ready on http://127.0.0.1:{server.port}", flush=True)  # noqa: T201 - what a caller waits for
    stopped.wait()
    server.stop()


def parse(arguments: Sequence[str]) -> ServerSettings:
    """Settings from an argument list; flags are the settings' names."""
    parser = argparse.ArgumentParser(prog="drafter-data engine embedded")
    add = parser.add_argument
    add("--model", type=Path)
    add("--dump-folder", type=Path, required=True)
    add("--port", type=int, default=0)
    add("--dumps", choices=("labelled", "unlabelled"), default="labelled")
    add("--final-norm", choices=("pre", "post"), default="pre")
    add("--layers")
    for name in ("max-prefill-tokens", "prefill-max-requests", "chunked-prefill-size", "max-running-requests"):
        add(f"--{name}", type=int)
    add("--skip-server-warmup", action="store_true")
    add("--request-log", type=Path)
    add("--timed", action="store_true")
    add("--timed-base-ms", type=float)
    add("--timed-us-per-token", type=float)
    for name in ("hidden-size", "num-layers", "context-length"):
        add(f"--{name}", type=int)
    add("--dtype", choices=("bf16", "fp32"))
    add("--fault", help="comma-separated NAME[:rate] of embedded/faults.py")
    add("--faults", type=Path, help="a script of faults, read again when it changes")
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    if "layers" in given:
        given["layers"] = parse_layers(given["layers"])
    if "fault" in given:
        given["fault"] = tuple(given["fault"].split(","))
    return ServerSettings(**given)


def main() -> None:
    """Exit 2 with one line when the engine cannot be started."""
    try:
        serve(parse(sys.argv[1:]))
    except DrafterDataError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
