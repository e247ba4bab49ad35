"""Small tmpfs mounts, where this test process may mount; root writes through file modes, so full and read-only need real ones."""

from __future__ import annotations

import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_tmpfs(folder: Path, options: str) -> Generator[Path]:
    """Mounts a tmpfs with `options` on a new folder for the duration; skips where mounting is not allowed."""
    with _mounted(["-t", "tmpfs", "-o", options, "tmpfs"], folder):
        yield folder


@contextmanager
def bind_mount(source: Path, folder: Path) -> Generator[Path]:
    """Mounts a folder a second time."""
    with _mounted(["--bind", str(source)], folder):
        yield folder


@contextmanager
def _mounted(arguments: list[str], folder: Path) -> Generator[None]:
    folder.mkdir()
    mounted = subprocess.run(["mount", *arguments, str(folder)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    """Changes a mount's options."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)
