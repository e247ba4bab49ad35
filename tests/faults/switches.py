"""The rows of the fault matrix: what is switched on, and what must come of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from data_contracts.extraction import GateReport
from tests.faults.cells import RIGHT, Bench, hit, leave_overs, restarted_when_gone, resumes, seed_of_one_each
from tests.support.engines import health_checks

FEW = 0.08


@dataclass(frozen=True)
class Row:
    """`name`, what the fault does, and how it is run; `labelled` and `unlabelled` are the right outcomes."""

    name: str
    what: str
    run: Callable[[Bench], str]
    labelled: str = RIGHT
    unlabelled: str = ""

    def expected(self, labelled: bool) -> str:
        return self.labelled if labelled or not self.unlabelled else self.unlabelled


def _spoils(name: str, **more: object) -> Callable[[Bench], str]:
    def run(bench: Bench) -> str:
        bench.set_faults(*hit(name, **more))  # type: ignore[arg-type]
        return bench.outcome(bench.extract)

    return run


def _waits(name: str) -> Callable[[Bench], str]:
    """A fault that is known, without labels, only when a time limit has passed: for time, one prompt is hit once and one always."""

    def run(bench: Bench) -> str:
        bench.set_faults(*hit(name, sticky=FEW, transient=FEW), seed=seed_of_one_each(bench.dataset, FEW))
        return bench.outcome(bench.extract)

    return run


def _all(*faults: dict[str, object], **changes: object) -> Callable[[Bench], str]:
    def run(bench: Bench) -> str:
        bench.set_faults(*faults)
        return bench.outcome(lambda store: bench.extract(store, **changes))  # type: ignore[arg-type]

    return run


def _canary(name: str) -> Callable[[Bench], str]:
    """On from the start: refused before the first sample is sent."""

    def run(bench: Bench) -> str:
        bench.set_faults({"name": name})

        def preflight(store: Path) -> GateReport:
            bench.preflight(store)
            return bench.extract(store)

        return bench.outcome(preflight)

    return run


def _rechecked(name: str) -> Callable[[Bench], str]:
    def run(bench: Bench) -> str:
        bench.set_faults(*hit(name, sticky=0, transient=0.5))
        return bench.outcome(lambda store: bench.extract(store, recheck_samples=100))

    return run


def _health_checks(bench: Bench) -> str:
    bench.set_faults({"name": "late", "seconds": 0.01})
    with health_checks(bench.engine.url, per_second=50):
        return bench.outcome(bench.extract)


def _exit(bench: Bench) -> str:
    bench.set_faults({"name": "exit", "after": 7})
    with restarted_when_gone(bench):
        return bench.outcome(bench.extract)


def _exit_for_good(bench: Bench) -> str:
    bench.set_faults({"name": "exit", "after": 7})
    store = bench.folder / f"store{bench.runs + 1}"
    outcome = bench.outcome(lambda store: bench.extract(store, engine_wait_seconds=0.5))
    bench.engine.process.stop()
    bench.set_faults()
    bench.engine.process.start()
    resumes(bench, store)
    return f"{outcome}, then resumed"


def _hung(bench: Bench) -> str:
    bench.set_faults({"name": "silent", "after": 5}, {"name": "health-503"})
    store = bench.folder / f"store{bench.runs + 1}"
    outcome = bench.outcome(lambda store: bench.extract(store, engine_wait_seconds=0.5))
    resumes(bench, store)
    return f"{outcome}, then resumed"


def _left_overs(bench: Bench) -> str:
    left = leave_overs(bench)
    bench.set_faults()
    outcome = bench.outcome(bench.extract)
    assert all(path.exists() for path in left), "what is not ours is not touched"
    for path in left[1:]:
        shutil.rmtree(path)
    return outcome


def _busy(bench: Bench) -> str:
    bench.set_faults(*hit("server-error", sticky=0.15))
    return bench.outcome(lambda store: bench.extract(store, engine_wait_seconds=0.4))


CONTENT = (
    Row("rows-missing", "half of the rows are not dumped", _waits("rows-missing"), "failed: row-count"),
    Row(
        "rows-missing under load",
        "the same, only with 4 or more in flight",
        _spoils("rows-missing", in_flight=4, sticky=0),
    ),
    Row("prefix-hit", "a cached prefix leaves only the tail", _waits("prefix-hit"), "failed: cached-prefix"),
    Row("swapped", "another prompt's states of equal length", _waits("swapped"), "failed: proof-failed"),
    Row("wrong-norm", "the final state behind the norm", _waits("wrong-norm"), "failed: proof-failed"),
    Row("nan", "one NaN", _spoils("nan"), "failed: not-finite"),
    Row("inf", "one infinite value", _spoils("inf"), "failed: not-finite"),
    Row("zeros", "the right size, all zeros", _waits("zeros"), "failed: zero-rows"),
    Row("zero-row", "one layer of one token is zero", _spoils("zero-row"), "failed: zero-rows"),
    Row("duplicate-layer", "one layer dumped twice", _spoils("duplicate-layer"), "failed: layers-equal"),
    Row("transposed", "layers and tokens change places", _spoils("transposed", sticky=0)),
    Row("transposed from the start", "the same, for every prompt", _canary("transposed"), "stopped: canary-beginning-differs"),
    Row("shifted-layer", "each aux layer is its neighbour, once", _rechecked("shifted-layer")),
    Row(
        "shifted-layer from the start", "the same, for every prompt", _canary("shifted-layer"), "stopped: canary-reference-differs"
    ),
)
ARRIVAL = (
    Row("foreign", "another client's prompt of equal length in between", _all({"name": "foreign"})),
    Row("health checks", "50 a second shift every counter", _health_checks),
    Row("late", "the reply comes before its dump", _all({"name": "late", "seconds": 0.06})),
    Row(
        "out of order",
        "dumps come in another order than replies",
        _all({"name": "late", "seconds": 0.1, "rate": 0.5}, {"name": "late", "seconds": 0.03}),
    ),
    Row("dropped", "no dump at all", _waits("dropped"), "failed: dump-missing"),
    Row("growing", "the dump grows under its final name", _all({"name": "growing", "seconds": 0.06})),
    Row("versions", "a shorter version comes first", _all({"name": "versions", "seconds": 0.06})),
    Row("unfinished", "the dump is never finished", _waits("unfinished"), "failed: dump-malformed"),
    Row("stale-lock", "a lock file that nobody holds", _all({"name": "stale-lock"})),
    Row("cut", "the last 64 bytes are missing", _waits("cut"), "failed: dump-malformed"),
    Row("trailing", "16 bytes too many", _waits("trailing"), "failed: dump-malformed"),
    Row("left-overs", "dumps of a killed server, foreign files", _left_overs),
)
SERVICE = (
    Row("silent", "some requests are never answered", _waits("silent"), "failed: no-answer"),
    Row("5xx", "some requests are always answered 503", _busy, "failed: engine-busy"),
    Row(
        "5xx burst",
        "0.6 s of 503 for everything, health checks too",
        _all(
            {"name": "server-error", "to_seconds": 0.6},
            {"name": "health-503", "to_seconds": 0.6},
        ),
    ),
    Row("health 503 while working", "health and readiness answer 503, requests work", _all({"name": "health-503"})),
    Row("health 503 while hung", "the same, and no request is answered", _hung, "stopped: engine-hung, then resumed"),
    Row("exit", "the engine exits and is started again", _exit),
    Row("exit for good", "the engine exits and stays away", _exit_for_good, "stopped: engine-lost, then resumed"),
    Row("cut-prompt", "prompts are cut silently", _spoils("cut-prompt"), "failed: prompt-tokens"),
)


ROWS = (*CONTENT, *ARRIVAL, *SERVICE)
