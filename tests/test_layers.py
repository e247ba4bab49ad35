"""Imports run one way: flows -> tasks -> drafter_data -> data_contracts; only flows and tasks know Prefect."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("data_contracts", "drafter_data", "tasks", "flows")
OUR_MODULES = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]
INPUT_OUTPUT = {
    "os",
    "io",
    "pathlib",
    "shutil",
    "socket",
    "requests",
    "subprocess",
    "pyarrow",
    "pandas",
    "numpy",
    "safetensors",
    "mmap",
}
EXTRAS = {"torch", "transformers", "tokenizers", "datasets", "speculators", "specforge", "sglang", "vllm", "matplotlib"}


def imported_roots(tree: ast.AST) -> set[str]:
    """Top-level names of everything that a module imports, at any depth."""
    roots: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            roots.add(node.module.split(".")[0])
    return roots


def imported_at_top(tree: ast.Module) -> set[str]:
    """Top-level names that importing the module imports (function bodies left out)."""
    body = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return imported_roots(ast.Module(body=list(body), type_ignores=[]))


@pytest.mark.parametrize("path", OUR_MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_imports_only_layers_below(path: Path) -> None:
    tree = ast.parse(path.read_text())
    layer = path.relative_to(ROOT).parts[0]
    above = set(LAYERS[LAYERS.index(layer) + 1 :])
    assert not imported_roots(tree) & above, f"{path} imports a layer above its own"
    if layer in ("data_contracts", "drafter_data"):
        assert "prefect" not in imported_roots(tree), f"{path}: only flows and tasks know Prefect"
    if layer == "data_contracts":
        assert not imported_roots(tree) & INPUT_OUTPUT, f"{path}: contracts do no input or output"
    if "capture" in path.parts:
        allowed = set(sys.stdlib_module_names) | {"torch", "safetensors", "sglang", "vllm", "sglang_hook"}
        assert imported_roots(tree) <= allowed, f"{path} runs inside the engine"
    else:
        assert not imported_at_top(tree) & EXTRAS, f"{path}: extras are imported inside the function that needs them"


def test_relative_imports_are_not_used() -> None:
    for path in OUR_MODULES:
        levels = [node.level for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        assert not any(levels), f"{path} uses a relative import, which hides its layer"
