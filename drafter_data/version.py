"""What code made a result."""

from __future__ import annotations

import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@cache
def code_version() -> str:
    """Package version, and the git revision when run from a checkout: `0.1.0+1a2b3c4d`, with `-dirty` when files are changed."""
    try:
        package = version("drafter-data")
    except PackageNotFoundError:
        package = "0"
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return package
    revision = _git(root, "rev-parse", "--short=8", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return f"{package}+{revision}{'-dirty' if changed else ''}" if revision else package


@cache
def version_in(python: str, package: str) -> str:
    """Version of a package in the environment of an interpreter; empty where it has none, or the interpreter is not there."""
    ask = "import sys, importlib.metadata as m; print(m.version(sys.argv[1]))"
    try:
        return subprocess.run(
            [python, "-I", "-c", ask, package], capture_output=True, text=True, timeout=60, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(root: Path, *arguments: str) -> str:
    try:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
