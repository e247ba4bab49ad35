"""`drafter-data status`: what a store holds, who works on it, and how long the rest will take."""

from __future__ import annotations

import time
from pathlib import Path

from data_contracts.forecast import Forecast
from data_contracts.status import StoreStatus
from drafter_data.cli.output import print_json, print_lines, print_table
from drafter_data.status import store_status
from drafter_data.store.store import Store
from drafter_data.units import duration, gigabytes

SHOWN_CHUNKS = 30


def status(store: Path, *, json: bool = False) -> None:
    """Show what a store holds, how far its plans are, who holds which chunk, and the forecast of the rest.

    Example: `drafter-data status .demo/store`

    Parameters
    ----------
    store
        Folder of the store.
    json
        Print the status as JSON.
    """
    opened = Store.open(store)
    report = store_status(opened)
    opened.close()
    if json:
        print_json(report)
    else:
        _print(report)


def _print(report: StoreStatus) -> None:
    identity = report.identity
    print_lines(
        f"{report.store}: {report.states:,} states, {gigabytes(report.bytes)}, {gigabytes(report.free_bytes)} free; layers "
        f"{', '.join(map(str, identity.layers))} of {identity.num_layers}, hidden {identity.hidden_size}, {identity.dtype}, "
        f"final state {identity.final_norm}-norm"
    )
    for plan in report.plans:
        rest = forecast_text(plan.forecast) if plan.forecast is not None else "no engine measured yet"
        title = f"plan {plan.dataset_id[:12]}: {plan.done:,} of {plan.samples:,} done, {plan.excluded:,} excluded; rest: {rest}"
        unfinished = [chunk for chunk in plan.chunks if chunk.done < chunk.samples]
        rows = [
            (one.index, one.key[:12], one.done, f"{one.samples - one.done:,} ({one.missing_tokens:,} tokens)", one.holder)
            for one in unfinished[:SHOWN_CHUNKS]
        ]
        print_lines(title)
        if rows:
            print_table("", ("chunk", "key", "done", "missing", "holder"), rows)
        if len(unfinished) > SHOWN_CHUNKS:
            print_lines(f"and {len(unfinished) - SHOWN_CHUNKS:,} more unfinished chunks (--json lists all)")
    for lease in report.leases:
        until = time.strftime("%H:%M:%S", time.localtime(lease.expires_at))
        print_lines(f"chunk {lease.chunk_key[:12]}: {lease.holder} on {lease.host} until {until}{'' if lease.live else ' (gone)'}")


def forecast_text(forecast: Forecast) -> str:
    """Time left, its 90 % interval, the finish time and the bytes to come."""
    finish = time.strftime("%a %H:%M", time.localtime(time.time() + forecast.seconds))
    return (
        f"{duration(forecast.seconds)} ({duration(forecast.low_seconds)}-{duration(forecast.high_seconds)}), done {finish}, "
        f"{gigabytes(forecast.bytes)} to come"
    )
