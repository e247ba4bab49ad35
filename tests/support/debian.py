"""Debian's packages for tests that need a program of theirs: installed where it is missing and may be, else the test skips."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

INSTALL_SECONDS = 300


def install(package: str) -> None:
    """Skips the test, with the reason, where `package` cannot be installed in a few minutes."""
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        pytest.skip(f"not root on a Debian: apt-get install {package}")
    command = ["apt-get", "install", "--yes", "--no-install-recommends", package]
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=quiet, timeout=INSTALL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"apt-get did not install {package} within {INSTALL_SECONDS} s")
    if done.returncode:
        pytest.skip(f"{package} is missing and apt-get could not install it: {done.stderr[-300:]}")
