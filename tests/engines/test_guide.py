"""docs/guide-sglang.md: its printed command is what `engine sglang --print` prints, and its figures add up."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from drafter_data.cli.main import run
from drafter_data.engines.launch_sglang import CAPTURE_FOLDER
from tests.engines.test_launch import stub

GUIDE = Path(__file__).parent.parent.parent / "docs" / "guide-sglang.md"
SHELL = re.compile(r"```sh\n(.*?)```", re.DOTALL)


def test_guide_printed_command_is_what_the_tool_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, shown = SHELL.findall(GUIDE.read_text())
    model = stub(tmp_path / "verifier", "KimiK25ForConditionalGeneration", 61, 7168, nested=True)
    words = shlex.split(asked.replace("/models/verifier", str(model)).replace("\\\n", " "))
    assert words[:3] == ["drafter-data", "engine", "sglang"] and "--print" in words
    assert run(words[1:]) == 0
    printed = capsys.readouterr().out.replace(str(model), "/models/verifier")
    assert printed.replace(str(CAPTURE_FOLDER), "/opt/drafter-data/drafter_data/capture") == shown


def test_guide_figures_add_up() -> None:
    text = " ".join(GUIDE.read_text().split())
    token = 4 * 7168 * 2 + 8
    assert f"4 x 7168 x 2 = {token - 8:,}, and 8 for the token id: {token:,}" in text
    assert f"a sample of 2,353 tokens | {2353 * token / 1e6:.0f} MB" in text
    assert f"37,312 samples, 87.8 million tokens | {87.8e6 * token / 1e9:,.0f} GB" in text
    assert f"one prompt of 16,384 tokens on the RAM disk | {16384 * token / 1e6:.0f} MB" in text
    assert 16 * 16384 * token <= 31e9 / 2
    assert f"--bytes-per-token {token}" in text
