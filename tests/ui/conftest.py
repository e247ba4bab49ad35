"""Debian's Chromium, headless, on the pages of a real Prefect server."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, sync_playwright

from tests.flows.conftest import services  # noqa: F401 - a fixture
from tests.support.debian import install

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def chromium() -> str:
    """The browser's program; Debian's package is installed where it is missing and may be."""
    if found := next(filter(None, map(shutil.which, CHROMIUM)), None):
        return found
    install("chromium")
    return shutil.which("chromium") or pytest.skip("apt-get installed no chromium")


@pytest.fixture
def browser_page(chromium: str) -> Iterator[Page]:
    """A fresh page."""
    flags = ["--disable-gpu", *(["--no-sandbox"] if os.geteuid() == 0 else [])]  # the sandbox refuses to run as root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        yield browser.new_page(viewport={"width": 1280, "height": 1000})
        browser.close()


@pytest.fixture
def shots(request: pytest.FixtureRequest) -> Path:
    """Where the screenshots stay: test-output/ui of the checkout."""
    folder = request.config.rootpath / "test-output" / "ui"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
