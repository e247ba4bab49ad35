"""Every command in the docs runs as it stands there, in the order in which it stands there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from drafter_data.embedded.launch import free_port
from drafter_data.remedies import REMEDIES
from drafter_data.report.reference import reference

ROOT = Path(__file__).parent.parent.parent
CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)
REASON = re.compile(r"^\| ((?:`[a-z-]+`(?:, )?)+) ", re.MULTILINE)


def commands_of(document: str) -> list[str]:
    """The lines behind `$ ` in the console blocks of a document, without comments."""
    blocks = CONSOLE.findall((ROOT / document).read_text())
    return [line[2:].partition("   # ")[0].rstrip() for block in blocks for line in block.splitlines() if line.startswith("$ ")]


@pytest.fixture(scope="module")
def guide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh folder in which the whole guide was run."""
    folder = tmp_path_factory.mktemp("guide")
    port = str(free_port())
    script = "set -eu\n" + "\n".join(commands_of("docs/guide.md")).replace("30001", port) + "\n"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    process = subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    (folder / "output.txt").write_bytes(output)
    assert process.returncode == 0, output.decode()[-3000:]
    return folder


def test_guide_commands_in_order_make_a_checked_hand_off(guide_folder: Path) -> None:
    for name in ("runs", "dataset", "store", "handoff"):
        assert (guide_folder / name).is_dir()
    assert "Traceback" not in (guide_folder / "output.txt").read_text()


def test_runbook_commands_on_the_guides_store_exit_0(guide_folder: Path) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in commands_of("docs/runbook.md"):
        done = subprocess.run(command.split(), cwd=guide_folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


def test_readme_commands_on_what_a_run_left_exit_0(guide_folder: Path) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ours = [command for command in commands_of("README.md") if command.startswith(".venv/bin/drafter-data ")]
    assert len(ours) == 2
    for command in ours:
        here = command.removeprefix(".venv/bin/").replace(".demo/", "").replace(".demo", ".")
        done = subprocess.run(here.split(), cwd=guide_folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    for shown in ("tokens a sample", "throughput", "chunks: ", "stored", "hand-off: ", "loss "):
        assert shown in done.stdout, f"status of a work folder shows {shown!r}"


def test_each_document_with_commands_is_run_by_a_test() -> None:
    with_commands = {path.name for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")] if CONSOLE.search(path.read_text())}
    run_by_tests = {
        "README.md", "CONTRIBUTING.md", "guide.md", "runbook.md",  # here
        "guide-sglang.md",  # tests/engines/test_guide.py
        "team.md",  # tests/team/test_team.py
    }  # fmt: skip
    assert with_commands == run_by_tests


def test_reference_is_what_the_code_says() -> None:
    assert (ROOT / "docs/reference.md").read_text() == reference(), "parameters or contracts have changed: make reference"


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_in_the_docs_exist(document: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for command in commands_of(document):
        if command.startswith("make "):
            assert re.search(rf"^{command.split()[1]}:", makefile, re.MULTILINE), command


def runbook_reasons() -> set[str]:
    rows = REASON.findall((ROOT / "docs/runbook.md").read_text())
    return {reason for row in rows for reason in re.findall(r"`([a-z-]+)`", row)}


def test_runbook_reasons_are_reasons_of_the_code() -> None:
    folders = (ROOT / "drafter_data", ROOT / "tasks", ROOT / "flows")
    code = "\n".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    reasons = runbook_reasons()
    assert len(reasons) > 20
    for reason in sorted(reasons):
        made = reason.removeprefix("canary-") if reason.startswith("canary-") else reason
        assert f'"{reason}"' in code or f'"{made}"' in code, f"{reason} is in the runbook, but nothing raises it"


def test_runbook_lists_each_reason_that_a_chunk_can_fail_with() -> None:
    assert sorted(set(REMEDIES) - runbook_reasons()) == []


def test_links_between_documents_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name} links to {target}"
