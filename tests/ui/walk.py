"""What a person does in Prefect's UI, one function a step. Waits for what is seen, never for a while."""

from __future__ import annotations

import re
from pathlib import Path

from playwright.sync_api import Locator, Page, expect

RUN_SECONDS = 240.0


class Walk:
    """A browser's page on the UI at `url`; a screenshot a step in `shots`."""

    def __init__(self, page: Page, url: str, shots: Path) -> None:
        self.page, self.url, self.shots, self._taken = page, url, shots, 0
        page.set_default_timeout(20_000)
        expect.set_options(timeout=20_000)

    def shot(self, name: str) -> None:
        """Keeps what is seen now."""
        self._taken += 1
        self.page.screenshot(path=self.shots / f"{self._taken}-{name}.png")

    def open_form(self, deployment: str) -> None:
        """Deployments > its name > Run > Custom run."""
        self.page.goto(f"{self.url}/deployments")
        self.page.get_by_role("link", name=deployment, exact=True).first.click()
        self.page.get_by_role("button", name="Run", exact=True).click()
        self.page.locator(".p-overflow-menu-item", has_text="Custom run").click()
        expect(self.field("Generation runs")).to_be_visible()

    def field(self, title: str) -> Locator:
        """The form's field of this title, with its description and input."""
        label = self.page.locator("label", has_text=re.compile(rf"^\s*{re.escape(title)} \("))
        return self.page.locator(".p-label.schema-form-property").filter(has=label).last

    def fill(self, title: str, value: str) -> None:
        """Types into a field."""
        self.field(title).locator("input, textarea").first.fill(value)

    def add_items(self, title: str, *values: str) -> None:
        """Adds lines to a list."""
        for place, value in enumerate(values):
            self.field(title).get_by_role("button", name="Add item").click()
            self.field(title).locator("textarea").nth(place).fill(value)

    def submit(self) -> None:
        """Sends the form and goes to the run that it made."""
        self.page.get_by_role("button", name="Submit").click()
        # A toast that slides in: by an event, since a click waits for it to stand still, and it is gone after a few seconds.
        self.page.get_by_role("button", name="View run").first.dispatch_event("click")
        self.page.wait_for_url("**/runs/flow-run/*")

    @property
    def run_id(self) -> str:
        """Of the run that is open."""
        return self.page.url.rpartition("/runs/flow-run/")[2].partition("?")[0]

    def wait_for_state(self, *names: str) -> str:
        """Until the open run's badge says one of these; returns which."""
        badge = self.page.locator(".page-heading-flow-run, .page-heading").locator(".state-badge").first
        expect(badge).to_have_text(re.compile("|".join(names)), timeout=RUN_SECONDS * 1000)
        return badge.inner_text().strip()

    def retry(self) -> None:
        """Presses Retry, and Retry again where the UI asks whether it is meant."""
        self.page.get_by_role("button", name="Retry", exact=True).first.click()
        self.page.locator(".p-modal").get_by_role("button", name="Retry", exact=True).click()

    def open_artifact(self, artifact_id: str) -> None:
        """The page of one artifact, once its picture or table is there."""
        self.page.goto(f"{self.url}/artifacts/artifact/{artifact_id}")
        expect(self.page.get_by_role("button", name="Show raw data")).to_be_visible()

    def open_run(self, run_id: str) -> None:
        """The page of a flow run."""
        self.page.goto(f"{self.url}/runs/flow-run/{run_id}")

    def expect_picture(self) -> None:
        """A picture is there, and the browser could read it."""
        picture = self.page.locator("img[src^='data:image/png']").first
        expect(picture).to_be_visible()
        expect(picture).to_have_js_property("complete", True)
        assert picture.evaluate("image => image.naturalWidth") >= 800

    def follow_link(self, name: str) -> None:
        """Goes where a link in an artifact's text leads (a click would open another tab)."""
        link = self.page.locator(".markdown-renderer a, article a, td a").get_by_text(name, exact=True).first
        self.page.goto(link.evaluate("text => text.closest('a').href"))
