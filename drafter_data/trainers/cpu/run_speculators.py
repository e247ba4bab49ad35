"""Runs `speculators ...` without a GPU: for demonstrations and tests. A script for the trainer's own environment.

speculators 0.9.0 places its model on an accelerator and synchronises it in its step timer; both are replaced here. Usage, with the
arguments of the `speculators` command: python run_speculators.py train ...
"""

from __future__ import annotations

from typing import Any


def main() -> None:
    """Replaces the two places and hands over."""
    import torch
    from speculators.__main__ import app  # pyright: ignore[reportMissingImports]
    from speculators.train import checkpointer, trainer  # pyright: ignore[reportMissingImports]

    cpu: Any = torch.device("cpu")
    for module in (trainer, checkpointer):
        if hasattr(module, "get_local_rank"):
            module.get_local_rank = lambda: cpu
    torch.accelerator.synchronize = _nothing_to_wait_for
    app()


def _nothing_to_wait_for(*_: object, **__: object) -> None:
    """Computing on the CPU is done when the call returns."""


if __name__ == "__main__":
    main()
