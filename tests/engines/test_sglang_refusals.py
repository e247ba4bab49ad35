"""Servers that were started wrongly are refused in the preflight, by real requests, with the flag named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drafter_data.engines.sglang_http import SGLangClient
from drafter_data.errors import PreflightRefused
from tests.engines.comparing import extract, prompts_of
from tests.engines.servers import Configuration, Engines

pytestmark = pytest.mark.real_engine


def nothing_matches(hooks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Hooks whose patterns match no module: the server only warns."""
    return [{**hook, "target_modules": ["no.such.module"]} for hook in hooks]


def test_sglang_with_other_aux_layers_than_its_hook_says_is_refused(
    engines: Engines, models: dict[str, Path], tmp_path: Path
) -> None:
    # A list that another family would take as these layers, so that only the first pass can tell.
    flags = ("--dtype", "float32", "--return-aux-hidden-state-layer-ids", "2", "4", "5")
    running = engines.running(Configuration("wrong-layers", models["llama"], flags=flags))
    with pytest.raises(PreflightRefused, match=r"self-check.*--return-aux-hidden-state-layer-ids"):
        extract(tmp_path, prompts_of(5, 1, 50), running.parameters())
    assert not (tmp_path / "store").exists()


def test_sglang_whose_hooks_match_nothing_is_refused(engines: Engines, models: dict[str, Path], tmp_path: Path) -> None:
    configuration = Configuration("no-hook", models["llama"], flags=("--dtype", "float32"), hooks=nothing_matches)
    running = engines.running(configuration)
    with pytest.raises(PreflightRefused, match="--forward-hooks"):
        extract(tmp_path, prompts_of(5, 1, 50), running.parameters(), dump_timeout_seconds=2)
    assert not (tmp_path / "store").exists()


def short_and_cached(models: dict[str, Path]) -> Configuration:
    """A context of 128 tokens, and the radix cache on."""
    flags = ("--dtype", "float32", "--context-length", "128")
    return Configuration("short", models["llama"], flags=flags, drop=("--disable-radix-cache",))


def test_sglang_with_radix_cache_and_no_extra_key_is_refused(
    engines: Engines, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = engines.running(short_and_cached(models))
    post = SGLangClient._json  # pyright: ignore[reportPrivateUsage]

    def without_key(self: SGLangClient, method: str, path: str, body: bytes | None, *rest: Any, **more: Any) -> dict[str, Any]:
        if path == "/generate" and body:
            body = json.dumps({key: value for key, value in json.loads(body).items() if key != "extra_key"}).encode()
        return post(self, method, path, body, *rest, **more)

    monkeypatch.setattr(SGLangClient, "_json", without_key)
    with pytest.raises(PreflightRefused, match="--disable-radix-cache"):
        extract(tmp_path, prompts_of(5, 40, 100), running.parameters(), dump_timeout_seconds=2)
    assert not (tmp_path / "store").exists()


def test_sglang_with_radix_cache_and_a_fresh_extra_key_gives_all_rows(
    engines: Engines, models: dict[str, Path], tmp_path: Path
) -> None:
    running = engines.running(short_and_cached(models))
    report, _, _ = extract(tmp_path, prompts_of(20, 40, 100), running.parameters())
    assert (report.failed, report.stored) == (0, 20)


def test_sglang_with_too_short_a_limit_is_refused(engines: Engines, models: dict[str, Path], tmp_path: Path) -> None:
    running = engines.running(short_and_cached(models))
    with pytest.raises(PreflightRefused, match="--context-length"):
        extract(tmp_path, prompts_of(5, 200, 300), running.parameters())
    assert not (tmp_path / "store").exists()
