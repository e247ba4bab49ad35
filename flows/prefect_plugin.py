"""Lets `prefect deployment run extract-100k` work in the checkout without the flow's name.

Stock Prefect takes only `<flow>/<deployment>`. This hook runs at `import prefect` and puts the flow's name in front when the
command line is exactly that command with exactly one of this project's deployments; it changes nothing else. It must stay
free of imports that cost time, since it runs with every Prefect command.
"""

from __future__ import annotations

import sys
from pathlib import PurePath

from prefect.plugins import HookContext, register_hook

FLOW_OF_DEPLOYMENT = {
    "extract-100k": "extract",
    "extract-chunk": "extract-chunk",
    "nightly-refresh": "refresh",
    "train": "train",
}
"""Must agree with prefect.yaml; a test compares them."""

# While `python -m prefect` imports its package, Python has put "-m" there.
_PREFECT_PROGRAMS = {"prefect", "prefect.exe", "-m", "__main__.py"}


@register_hook
def setup_environment(*, ctx: HookContext) -> None:  # noqa: ARG001 - the name belongs to the hook's contract
    """Called by Prefect at import (settings: `[tool.prefect.plugins] enabled` in pyproject.toml)."""
    sys.argv[:] = with_flow_name(sys.argv)


def with_flow_name(argv: list[str]) -> list[str]:
    """`argv` with the flow's name in front of the deployment's, where it is `prefect deployment run <one of ours>`."""
    if argv[1:3] != ["deployment", "run"] or PurePath(argv[0]).name not in _PREFECT_PROGRAMS:
        return list(argv)
    for i in range(3, len(argv)):
        flow = FLOW_OF_DEPLOYMENT.get(argv[i])
        if flow is not None and not _takes_value(argv[i - 1]):
            return [*argv[:i], f"{flow}/{argv[i]}", *argv[i + 1 :]]
    return list(argv)


def _takes_value(argument: str) -> bool:
    """Whether the next argument may be this option's value (`--tag extract-100k`), not the deployment."""
    return argument.startswith("-") and "=" not in argument and argument != "--watch"
