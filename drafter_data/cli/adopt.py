"""`drafter-data adopt`: an earlier extraction becomes a store, without extracting again what is right."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from data_contracts.parameters import EngineParameters
from drafter_data.checkpoints import Checkpoint
from drafter_data.cli.output import SHOWN_FINDINGS, console, findings_table, print_json, print_lines
from drafter_data.dataset import Dataset
from drafter_data.store.activity import working
from drafter_data.store.store import Store
from drafter_data.trainers.adopt import Adoption, AdoptReport, identity_for
from drafter_data.trainers.adopt_recheck import engine_recheck
from drafter_data.trainers.adopt_sources import EarlierExtraction, open_req_folders, open_specforge, open_speculators


def adopt(
    folder: Path,
    *,
    source: Annotated[Literal["speculators", "specforge", "req-folders"], Parameter(name="--from")],
    store: Path,
    model: Path,
    data: Path | None = None,
    dataset: Path | None = None,
    layers: Annotated[tuple[int, ...] | None, Parameter(consume_multiple=True)] = None,
    url: str | None = None,
    kind: Literal["embedded", "sglang", "sglang-unlabelled", "vllm"] = "sglang",
    dump_folder: Path | None = None,
    rechecks: int = 5,
    json: bool = False,
) -> int:
    """Verify an earlier extraction sample by sample against its token ids, and commit what is right to a store.

    Example: `drafter-data adopt /data/hidden_states --from speculators --store /data/store --model /models/verifier`

    Exit code 1 when nothing could be adopted.

    Parameters
    ----------
    folder
        What the earlier extraction left.
    source
        speculators (hs_<row>.safetensors and its dataset), specforge (*.ckpt, post-norm), req-folders (req_<n>/layer_<i>).
    store
        Folder of the store; made when it is missing. Post-norm data make a post-norm store.
    model
        Checkpoint folder of the verifier.
    data
        speculators: the saved dataset, where there are several below the folder.
    dataset
        specforge: adopt only prompts of this dataset. req-folders: the dataset whose prompts were sent.
    layers
        Hugging Face indices of the stored layers, the final one last; EAGLE-3's by default.
    url
        An engine that a few samples are extracted from again, to compare layer by layer.
    kind
        Which engine that is; embedded and sglang dumps carry labels.
    dump_folder
        Where it dumps; the folder that it names by default.
    rechecks
        How many samples, evenly spread.
    json
        Print the report as JSON.
    """
    verifier = Checkpoint.open(model)
    known = Dataset.open(dataset) if dataset else None
    extraction = _open(source, folder, data, known)
    opened = Store.open(store, identity_for(extraction, verifier, layers))
    try:
        adoption = Adoption(extraction, opened, verifier)
        with working(store, "drafter-data adopt"), ExitStack() as stack:
            recheck = None
            if url is not None:
                settings = EngineParameters(
                    kind=kind, url=url, model=str(model), dump_folder=str(dump_folder) if dump_folder else None
                )
                recheck = stack.enter_context(engine_recheck(settings, opened.identity, verifier))
            report = adoption.run(recheck, rechecks)
    finally:
        opened.close()
    if json:
        print_json(report)
    else:
        _print(report)
    return 0 if report.adopted or report.already_there else 1


def _open(source: str, folder: Path, data: Path | None, dataset: Dataset | None) -> EarlierExtraction:
    if source == "speculators":
        return open_speculators(folder, data)
    if source == "specforge":
        return open_specforge(folder, dataset)
    return open_req_folders(folder, dataset)


def _print(report: AdoptReport) -> None:
    rejected = sum(report.rejected.values())
    print_lines(
        f"{report.store}: {report.adopted:,} of {report.read:,} samples adopted, {report.already_there:,} already there, "
        f"{rejected:,} rejected"
    )
    if report.findings:
        console().print(findings_table(report.findings[:SHOWN_FINDINGS], f"Rejected ({rejected}; --json lists all)"))
