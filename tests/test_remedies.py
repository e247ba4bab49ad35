"""Each reason that a sample, the store or the engine can fail with has a remedy that somebody thought about."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from drafter_data.remedies import REMEDIES, RETRY, remedy

ROOT = Path(__file__).parent.parent
FAMILIES = {"SampleError", "StoreError", "EngineLost"}
CHOSEN_AT_RUN_TIME = {"not-finite", "zero-rows", "engine-hung", "store-read-only", "not-attempted", "state-unreadable"}
"""Passed on as variables, which the syntax tree does not show."""
RETRY_IS_ALL = {"not-attempted", "interrupted", "state-missing"}


def syntax_trees() -> list[ast.Module]:
    return [ast.parse(path.read_text()) for folder in ("drafter_data", "tasks", "flows") for path in (ROOT / folder).rglob("*.py")]


def classes_of(trees: list[ast.Module]) -> dict[str, ast.ClassDef]:
    """The families' classes by name."""
    defined = {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

    def belongs(name: str) -> bool:
        bases = [ast.unparse(base).rpartition(".")[2] for base in defined[name].bases] if name in defined else []
        return name in FAMILIES or any(belongs(base) for base in bases)

    return {name: node for name, node in defined.items() if belongs(name)}


def texts(node: ast.expr | None) -> Iterator[str]:
    for part in ast.walk(node) if node is not None else ():
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def name_of(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def reasons_in_code() -> set[str]:
    trees = syntax_trees()
    families = classes_of(trees)
    found: set[str] = set()
    for node in families.values():
        for line in node.body:
            names = line.targets if isinstance(line, ast.Assign) else [line.target] if isinstance(line, ast.AnnAssign) else []
            if isinstance(line, (ast.Assign, ast.AnnAssign)) and "reason" in map(ast.unparse, names):
                found.update(texts(line.value))
    for tree in trees:
        for node in ast.walk(tree):
            given = [keyword.value for keyword in node.keywords if keyword.arg == "reason"] if isinstance(node, ast.Call) else []
            if isinstance(node, ast.Call) and given and name_of(node) in families:
                found.update(texts(given[0]))
    return found


def test_remedies_of_every_reason_in_the_code_are_written() -> None:
    reasons = reasons_in_code()
    assert {"dump-missing", "no-answer", "dump-folder-held", "engine-exited"} <= reasons, "the search finds nothing"
    assert sorted((reasons | CHOSEN_AT_RUN_TIME) - set(REMEDIES)) == []


def test_remedies_that_only_say_retry_are_few_and_meant() -> None:
    assert {reason for reason in REMEDIES if remedy(reason) == RETRY} == RETRY_IS_ALL
