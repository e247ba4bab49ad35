"""Progress of an extraction in the terminal: a line every few seconds, and a bar below it where there is a terminal."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from drafter_data.extraction.progress import Snapshot


class TerminalProgress:
    """Writes to standard error, so that standard output stays for the result."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            columns = (BarColumn(bar_width=30), TaskProgressColumn(), TextColumn("of the tokens; {task.description}"))
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("waiting for the first sample", total=1.0)

    def __enter__(self) -> TerminalProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def show(self, snapshot: Snapshot) -> None:
        """Shows the run now."""
        if self._bar:
            self._bar.console.print(snapshot.line(), highlight=False)
            self._bar.update(self._task, completed=snapshot.share, description=f"{snapshot.done:,} of {snapshot.total:,} samples")
        else:
            print(snapshot.line(), file=sys.stderr, flush=True)  # noqa: T201 - progress for people
