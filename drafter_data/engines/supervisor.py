"""Runs a server and takes its whole process group down when the starter dies, also by SIGKILL.

Standard library only: run as a script, isolated, so that it starts in milliseconds and needs nothing from the environment.
A watched parent beats PR_SET_PDEATHSIG, which fires when the starting THREAD ends, and a pipe, whose write end a forked sibling
may hold.
Usage: supervisor.py PARENT_PID GRACE_SECONDS -- ARGV...
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

POLL_SECONDS = 0.25


def main() -> int:
    """The server's exit status (128 + n for signal n)."""
    parent, grace_seconds, argv = int(sys.argv[1]), float(sys.argv[2]), sys.argv[4:]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        server = subprocess.Popen(argv, preexec_fn=_reset_signals)  # noqa: PLW1509 - this process has one thread
    except OSError as error:
        print(f"{argv[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201
        return 127
    while server.poll() is None:
        if os.getppid() != parent:
            _end_group(grace_seconds, server)
        signal.sigtimedwait({signal.SIGCHLD}, POLL_SECONDS)
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


def _reset_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _end_group(grace_seconds: float, server: subprocess.Popen[bytes]) -> None:
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    while server.poll() is None and time.monotonic() < deadline:
        signal.sigtimedwait({signal.SIGCHLD}, POLL_SECONDS)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
