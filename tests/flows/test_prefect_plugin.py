"""`prefect deployment run extract-100k` without the flow's name, and nothing else changed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml

from flows import prefect_plugin
from flows.prefect_plugin import FLOW_OF_DEPLOYMENT, with_flow_name

ROOT = Path(__file__).parent.parent.parent


def test_deployment_names_equal_those_of_prefect_yaml() -> None:
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    named = {}
    for deployment in deployments:
        module, _, function = deployment["entrypoint"].rpartition(".")
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
        flow = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
        decorator = next(node for node in flow.decorator_list if isinstance(node, ast.Call))
        named[deployment["name"]] = next(ast.literal_eval(word.value) for word in decorator.keywords if word.arg == "name")
    assert named == FLOW_OF_DEPLOYMENT


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("prefect deployment run extract-100k", "prefect deployment run extract/extract-100k"),
        ("/a/bin/prefect deployment run --watch extract-100k", "/a/bin/prefect deployment run --watch extract/extract-100k"),
        ("-m deployment run nightly-refresh --param a=1", "-m deployment run refresh/nightly-refresh --param a=1"),
        ("prefect deployment run --tag x extract-chunk", "prefect deployment run --tag x extract-chunk/extract-chunk"),
    ],
)
def test_short_name_of_a_deployment_is_completed(given: str, expected: str) -> None:
    assert with_flow_name(given.split()) == expected.split()


@pytest.mark.parametrize(
    "given",
    [
        "prefect deployment run extract/extract-100k",
        "prefect deployment run other",
        "prefect deployment run --tag extract-100k other/deployment",
        "prefect deployment inspect extract-100k",
        "prefect flow-run retry extract-100k",
        "prefect",
        "pytest deployment run extract-100k",
    ],
)
def test_other_command_lines_stay_as_they_are(given: str) -> None:
    assert with_flow_name(given.split()) == given.split()


def test_plugin_imports_nothing_but_prefect_itself() -> None:
    tree = ast.parse(Path(prefect_plugin.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= {"__future__", "pathlib", "prefect.plugins"}
