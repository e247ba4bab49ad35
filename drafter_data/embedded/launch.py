"""How the embedded engine is started as a process of its own."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from drafter_data.embedded.settings import ServerSettings

SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment for the process: matrices this small lose more to a thread pool than they gain, and one thread gives the same bits
everywhere."""


def embedded_command(*, model: Path, dump_folder: Path, port: int, flags: Sequence[str] = ()) -> list[str]:
    """Argument list that serves `model` on 127.0.0.1:`port` and dumps into `dump_folder`; run it with `SINGLE_THREADED` set."""
    base = [sys.executable, "-m", "drafter_data.embedded", "--model", str(model), "--dump-folder", str(dump_folder)]
    return [*base, "--port", str(port), *flags]


def settings_command(settings: ServerSettings) -> list[str]:
    """Argument list that starts an engine with these settings; what equals a default is left out."""
    argv = [sys.executable, "-m", "drafter_data.embedded"]
    for field in fields(settings):
        value = getattr(settings, field.name)
        if value == field.default:
            continue
        argv.append("--" + field.name.replace("_", "-"))
        if value is not True:
            argv.append(",".join(map(str, value)) if isinstance(value, tuple) else str(value))
    return argv


def free_port() -> int:
    """A port on 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
