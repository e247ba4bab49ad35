"""How the embedded engine is started as a process of its own."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path

SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment for the process: matrices this small lose more to a thread pool than they gain, and one thread gives the same bits
everywhere."""


def embedded_command(*, model: Path, dump_folder: Path, port: int, flags: Sequence[str] = ()) -> list[str]:
    """Argument list that serves `model` on 127.0.0.1:`port` and dumps into `dump_folder`; run it with `SINGLE_THREADED` set."""
    base = [sys.executable, "-m", "drafter_data.embedded", "--model", str(model), "--dump-folder", str(dump_folder)]
    return [*base, "--port", str(port), *flags]


def free_port() -> int:
    """A port on 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
