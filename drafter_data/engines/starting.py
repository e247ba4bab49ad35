"""An engine for the length of a run: the one that is named, or one that is started here and ended with the run."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import requests

from data_contracts.parameters import EngineParameters
from drafter_data.checkpoints import Checkpoint
from drafter_data.claiming.folder import DumpFolder
from drafter_data.embedded.checkpoint import ensure_checkpoint
from drafter_data.embedded.launch import SINGLE_THREADED, embedded_command, free_port
from drafter_data.engines.launch import bytes_per_token, checked_layers
from drafter_data.engines.launch_sglang import sglang_command
from drafter_data.engines.launch_vllm import vllm_command
from drafter_data.engines.process import EngineProcess
from drafter_data.errors import InputError, PreflightRefused
from drafter_data.workspace import Workspace

EMBEDDED_READY_SECONDS = 60.0
ENGINE_POLL_SECONDS = 2.0
READY_SECONDS = 7200.0
"""Weights of hundreds of gigabytes take their time from a cold disk."""
RAM_DISK = Path("/dev/shm")  # noqa: S108 - a folder of our own, 0700, is made in it


def wait_for_engine(settings: EngineParameters, seconds: float) -> None:
    """Waits until the engine at the named URL answers, at most `seconds`: what comes then says better what is wrong.

    A host whose engine is gone would else fail one chunk after another as fast as the queue has them.
    """
    if settings.url is None:
        return
    deadline = time.monotonic() + seconds
    while not _answers(settings.url) and time.monotonic() < deadline:
        time.sleep(ENGINE_POLL_SECONDS)


def _answers(url: str) -> bool:
    try:
        return requests.get(f"{url.rstrip('/')}/health", timeout=10).ok
    except requests.RequestException:
        return False


def model_of(settings: EngineParameters, workspace: Workspace) -> Path | None:
    """The verifier's checkpoint folder where it is known before the engine is asked; the embedded engine's is made here."""
    if settings.model is not None:
        return Path(settings.model).expanduser().absolute()
    if settings.kind == "embedded" and settings.url is None:
        return ensure_checkpoint(workspace.engine_folder / "model")
    return None


def state_bytes_per_token(settings: EngineParameters, model: Path | None) -> int:
    """Bytes of a stored token (states and id) as far as the model's configuration tells; 0 where no model is known yet."""
    if model is None:
        return 0
    checkpoint = Checkpoint.of_config(model)
    return bytes_per_token(checkpoint, checked_layers(checkpoint, settings.layers), None) + 8


@contextmanager
def running_engine(settings: EngineParameters, workspace: Workspace) -> Generator[EngineParameters]:
    """Yields the settings of an engine that runs. With no URL, one is started in a process group of its own and ended on leaving.

    Raises InputError for an engine that cannot be started from here, EngineLost when it ends before it is ready.
    """
    if settings.url is not None:
        yield settings
        return
    model = model_of(settings, workspace)
    if model is None:
        raise InputError(
            f"the flow cannot start {settings.kind} without a model: name its checkpoint folder (engine.model), or the URL of a "
            "running engine (engine.url)",
            reason="model-missing",
        )
    dump_folder = _dump_folder(settings, workspace)
    DumpFolder.open(dump_folder).close()  # refused here, not by an engine that does not start
    port = free_port()
    argv, env, ready_seconds = _command(settings, model, dump_folder, port)
    with EngineProcess(
        argv,
        env=env,
        log=workspace.engine_folder / "engine.log",
        ready_url=f"http://127.0.0.1:{port}/health",
        ready_timeout_seconds=ready_seconds,
    ):
        named = {"url": f"http://127.0.0.1:{port}", "model": str(model), "dump_folder": str(dump_folder)}
        yield settings.model_copy(update=named)


def _command(settings: EngineParameters, model: Path, dump_folder: Path, port: int) -> tuple[list[str], Mapping[str, str], float]:
    """Argument list, environment, and how long the engine may take to be ready."""
    if settings.kind == "embedded":
        flags = ["--final-norm", settings.final_norm, *settings.launch_flags]
        if settings.layers:
            flags += ["--layers", ",".join(map(str, settings.layers))]
        return (
            embedded_command(model=model, dump_folder=dump_folder, port=port, flags=flags),
            SINGLE_THREADED,
            EMBEDDED_READY_SECONDS,
        )
    if settings.kind == "sglang":
        command = sglang_command(
            model, dump_folder, layers=settings.layers, final_norm=settings.final_norm, port=port, flags=settings.launch_flags
        )
    elif settings.kind == "vllm":
        command = vllm_command(model, dump_folder, layers=settings.layers, port=port, flags=settings.launch_flags)
    else:
        raise InputError(
            f"the flow cannot start {settings.kind}: name the URL of the running engine (engine.url)", reason="engine-not-startable"
        )
    return list(command.argv), command.environment(), READY_SECONDS


def _dump_folder(settings: EngineParameters, workspace: Workspace) -> Path:
    """The named folder, or one of a fixed name, so that what a killed run left is found and swept by the next."""
    if settings.dump_folder is not None:
        folder = Path(settings.dump_folder).expanduser().absolute()
    elif settings.kind == "embedded" or not RAM_DISK.is_dir():
        folder = workspace.engine_folder / "dumps"
    else:
        folder = RAM_DISK / f"drafter-data-{os.getuid()}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise PreflightRefused(
            f"dump folder {folder} cannot be made: {error.strerror}; name a writable folder (engine.dump_folder)",
            reason="dump-folder-not-writable",
        ) from error
    return folder
