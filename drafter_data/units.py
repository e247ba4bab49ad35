"""Sizes and times for people, the same in the terminal, in logs and in the UI."""

from __future__ import annotations


def gigabytes(size: int) -> str:
    """Bytes as GB, or as MB below one."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.2f} MB"


def duration(seconds: float) -> str:
    """Seconds as s, min or h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.1f} h"
