"""What every task shares: no result cache (receipts and records on disk are the truth), names, and artifacts for the UI.

Tables are for machines and people; pages are Markdown with pictures in them. A page links to what the same run has published
before, and the last page of a run, `report`, to all of it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging import get_run_logger
from prefect.settings import get_current_settings

from drafter_data.report.text import markdown_table

STAGE: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False}
"""A stage finds out for itself what is done: a cached result is no proof that its files are still there."""
NAME_MARK = " · "
"""Between a run's own name and what the run says of itself."""


def say(message: str) -> None:
    """One line in the log of the run, or of the process where there is no run."""
    run_logger().info(message)


def run_logger() -> logging.Logger | logging.LoggerAdapter[Any]:
    """The logger of the running flow or task; it may be used from other threads."""
    inside = FlowRunContext.get() or TaskRunContext.get()
    return get_run_logger() if inside else logging.getLogger("drafter_data")


def publish_table(key: str, description: str, rows: Sequence[Mapping[str, object]]) -> None:
    """A table artifact; `rows` share their columns. Cells that JSON does not know become text."""
    cells = [{name: value if isinstance(value, (int, float)) else str(value) for name, value in row.items()} for row in rows]
    create_table_artifact(key=key, table=cells, description=description)


def publish_facts(key: str, description: str, facts: Mapping[str, object]) -> None:
    """A table artifact of two columns: what, and how much."""
    publish_table(key, description, [{"what": name, "value": value} for name, value in facts.items()])


def publish_page(key: str, description: str, *parts: str) -> UUID:
    """A Markdown artifact: its parts, and links to what this run has published so far. Returns its id, for `update_page`."""
    text = page_text(*parts, links_line())
    return cast(UUID, create_markdown_artifact(markdown=text, key=key, description=description))


def update_page(page: UUID, description: str, *parts: str) -> None:
    """Puts other contents into a page.

    Not by Prefect's own `update_artifact`: that keeps the whole contents once more in the event of each update.
    """
    with get_client(sync_client=True) as client:
        body = {"data": page_text(*parts, links_line()), "description": description}
        client.request("PATCH", "/artifacts/{id}", path_params={"id": page}, json=body)


def page_text(*parts: str) -> str:
    """The parts that are not empty, as paragraphs."""
    return "\n\n".join(part for part in parts if part)


def links_line() -> str:
    """`This run: merge · lengths · …`, each a link to the latest artifact of that key in this flow run, in order of appearance."""
    run_id = _flow_run_id()
    if run_id is None:
        return ""
    run = f"[This run]({ui_link(f'runs/flow-run/{run_id}')})"
    links = [link for link, _ in published(run_id)]
    return f"{run}: {' · '.join(links)}" if links else run


def published(run_id: UUID) -> list[tuple[str, str]]:
    """A link to the latest artifact of each key in a flow run, and its description, in order of appearance."""
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run_id])))
    latest = {one.key: one for one in sorted(found, key=lambda one: str(one.created)) if one.key}
    return [(f"[{key}]({ui_link(f'artifacts/artifact/{one.id}')})", one.description or "") for key, one in latest.items()]


def publish_report(state: State[Any] | None) -> State[Any] | None:
    """The last page of a run: how it ended, and what each artifact says. Returns `state`, also when there is nobody to tell."""
    run_id = _flow_run_id()
    if state is None or run_id is None:
        return state
    try:
        rows = [{"artifact": link, "what it says": told} for link, told in published(run_id)]
        told = f"{state.name}: {state.message or ''}"
        create_markdown_artifact(markdown=markdown_table(rows), key="report", description=told)
    except Exception as error:  # noqa: BLE001 - the run has ended as it has, whether its report arrives or not
        run_logger().warning("the report was not published: %s", error)
    return state


def ui_link(path: str) -> str:
    """The address of a page of the UI, as browsers reach it (PREFECT_UI_URL, or where the API is)."""
    settings = get_current_settings()
    base = settings.ui_url or str(settings.api.url or "").removesuffix("/api")
    return f"{base.rstrip('/')}/{path}"


def name_run(told: str) -> None:
    """Puts what the run is about behind its own name, once: `brave-otter · 5c1f0a2b3c4d, 300 samples, 61,204 tokens`."""
    run_id = _flow_run_id()
    if run_id is None:
        return
    with get_client(sync_client=True) as client:
        own = client.read_flow_run(run_id).name.split(NAME_MARK)[0]
        client.set_flow_run_name(run_id, f"{own}{NAME_MARK}{told}")


def _flow_run_id() -> UUID | None:
    inside = FlowRunContext.get()
    if inside is not None and inside.flow_run is not None:
        return inside.flow_run.id
    task = TaskRunContext.get()
    return task.task_run.flow_run_id if task is not None else None
