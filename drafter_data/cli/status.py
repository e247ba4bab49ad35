"""`drafter-data status`: what a store holds, who works on it, and how long the rest will take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_contracts.forecast import Forecast
from data_contracts.identity import KEY_HEX_DIGITS
from data_contracts.lengths import LengthProfile
from data_contracts.status import HandoffStatus, PlanStatus, StoreStatus, Throughput
from data_contracts.validation import ValidationReport
from drafter_data.cli.output import print_json, print_lines, print_table
from drafter_data.report.chunks import counted, grid_lines, states_of
from drafter_data.report.text import bar, rechecks_text, sparkline
from drafter_data.status import store_status, work_status
from drafter_data.store.store import Store
from drafter_data.units import duration, gigabytes
from drafter_data.workspace import STORE_FOLDER

SHOWN_CHUNKS = 30


def status(store: Path, *, json: bool = False) -> None:
    """Show what a store holds, how far its plans are, who holds which chunk, and the forecast of the rest.

    Example: `drafter-data status .demo`

    Of a work folder also the lengths of its latest dataset and its latest hand-off with the training curve: what the UI shows.

    Parameters
    ----------
    store
        Folder of the store, or the work folder that it lies in.
    json
        Print the status as JSON.
    """
    work = store if (store / STORE_FOLDER).is_dir() else None
    opened = Store.open(store if work is None else work / STORE_FOLDER)
    report = store_status(opened) if work is None else work_status(work, opened)
    opened.close()
    if json:
        print_json(report)
    else:
        _print(report)


def _print(report: StoreStatus) -> None:
    identity = report.identity
    if report.lengths is not None:
        _print_lengths(report.lengths)
    print_lines(
        f"{report.store}: {report.states:,} states, {gigabytes(report.bytes)}, {gigabytes(report.free_bytes)} free; layers "
        f"{', '.join(map(str, identity.layers))} of {identity.num_layers}, hidden {identity.hidden_size}, {identity.dtype}, "
        f"final state {identity.final_norm}-norm"
    )
    if report.throughput is not None:
        print_lines(throughput_text(report.throughput))
    for plan in report.plans:
        _print_plan(plan)
    for lease in report.leases:
        until = time.strftime("%H:%M:%S", time.localtime(lease.expires_at))
        what = f"chunk {lease.chunk_key[:12]}" if len(lease.chunk_key) == KEY_HEX_DIGITS else "run"
        print_lines(f"{what}: {lease.holder} on {lease.host} until {until}{'' if lease.live else ' (gone)'}")
    if report.handoff is not None:
        _print_handoff(report.handoff)


def _print_lengths(profile: LengthProfile) -> None:
    columns = ("run", "samples", "tokens", *profile.groups[0].quantiles_tokens)
    rows = [(one.run, one.samples, one.tokens, *one.quantiles_tokens.values()) for one in profile.groups]
    print_table(f"dataset {profile.dataset_id[:12]}, tokens a sample", columns, rows)
    if len(profile.histogram_samples) > 1:
        first, last = profile.histogram_lower_tokens[0], profile.histogram_lower_tokens[-1]
        print_lines(f"lengths {first:,} to {2 * last - 1:,}, doubling: {sparkline(profile.histogram_samples)}")


def _print_plan(plan: PlanStatus) -> None:
    rest = forecast_text(plan.forecast) if plan.forecast is not None else "no engine measured yet"
    share, states = plan.done / plan.samples if plan.samples else 1.0, states_of(plan.chunks)
    print_lines(
        f"plan {plan.dataset_id[:12]}: {plan.done:,} of {plan.samples:,} done, {plan.excluded:,} excluded; rest: {rest}",
        f"{bar(share)} {share:.1%} of the samples; chunks: {counted(states)}",
        *grid_lines(states),
    )
    unfinished = [chunk for chunk in plan.chunks if chunk.done < chunk.samples]
    rows = [
        (one.index, one.key[:12], one.done, f"{one.samples - one.done:,} ({one.missing_tokens:,} tokens)", one.failed, one.holder)
        for one in unfinished[:SHOWN_CHUNKS]
    ]
    if rows:
        print_table("", ("chunk", "key", "done", "missing", "failed", "holder"), rows)
    if len(unfinished) > SHOWN_CHUNKS:
        print_lines(f"and {len(unfinished) - SHOWN_CHUNKS:,} more unfinished chunks (--json lists all)")
    if plan.validation is not None:
        _print_validation(plan.validation)


def _print_validation(report: ValidationReport) -> None:
    print_lines(f"validated: {report.samples:,} samples, {report.errors:,} errors, {report.missing:,} missing")
    if report.rechecks is not None:
        print_lines(rechecks_text(report.rechecks))
    if report.layers:
        rows = [
            (one.layer, f"{one.rms_p01:.4g}", f"{one.rms_p50:.4g}", f"{one.rms_p99:.4g}", wander(one.ratio_over_run))
            for one in report.layers
        ]
        print_table("", ("layer", "RMS p1", "p50", "p99", "ratio to the others, off its median over the run"), rows)


def _print_handoff(handoff: HandoffStatus) -> None:
    manifest, curve = handoff.manifest, handoff.curve
    print_lines(f"hand-off: {manifest.samples:,} samples for {manifest.trainer} at {manifest.folder}")
    if curve:
        losses = [point.loss for point in curve]
        print_lines(f"loss {sparkline(losses)} {losses[0]:.4g} to {losses[-1]:.4g}, step {curve[-1].step:,}")
        accuracies = [point.accuracy for point in curve if point.accuracy is not None]
        if accuracies:
            print_lines(f"accuracy {sparkline(accuracies)} {accuracies[0]:.1%} to {accuracies[-1]:.1%}")


def wander(ratios: Sequence[float]) -> str:
    """How far the farthest part of a run lies from the middle one: a percent or two is usual, more is an engine that changed."""
    return f"{np.max(np.abs(np.array(ratios) / np.median(ratios) - 1)):.1%} at most" if ratios else "-"


def throughput_text(found: Throughput) -> str:
    """A line with the latest stretch of work as a sparkline."""
    rates = found.tokens_per_second
    return (
        f"throughput {sparkline(rates)} average {np.mean(rates):,.0f} tok/s, {duration(found.ended_at - found.started_at)} from "
        f"{time.strftime('%a %H:%M', time.localtime(found.started_at))}"
    )


def forecast_text(forecast: Forecast) -> str:
    """Time left, its 90 % interval, what follows, the finish time and the bytes to come."""
    finish = time.strftime("%a %H:%M", time.localtime(time.time() + forecast.total_seconds))
    then = "".join(f", {one.stage} {duration(one.seconds)}" for one in forecast.following)
    return (
        f"{duration(forecast.seconds)} ({duration(forecast.low_seconds)}-{duration(forecast.high_seconds)}){then}, done {finish}, "
        f"{gigabytes(forecast.bytes)} to come"
    )
