"""`drafter-data engine sglang` and `engine vllm`: the exact command for a real server, printed or run."""

from __future__ import annotations

import json as json_format
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from data_contracts.identity import FinalNorm
from drafter_data.embedded.settings import parse_layers
from drafter_data.engines.launch import LaunchCommand
from drafter_data.engines.launch_sglang import sglang_command
from drafter_data.engines.launch_vllm import vllm_command
from drafter_data.errors import UsageError

Port = Annotated[int, Parameter(validator=Number(gte=1, lte=65535))]
Print = Annotated[bool, Parameter(name="--print", negative="")]
MoreFlags = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]


def sglang(
    *more: MoreFlags,
    model: Path,
    dump_folder: Path,
    layers: str | None = None,
    final_norm: FinalNorm = "pre",
    via: Literal["aux", "input_layernorm", "plugin"] | None = None,
    port: Port = 30000,
    python: str | None = None,
    print_: Print = False,
    json: bool = False,
) -> None:
    """Start an unpatched SGLang (0.5.23 or later) on 127.0.0.1 that dumps hidden states. What follows `--` goes to SGLang as it is.

    Example: `drafter-data engine sglang --model /models/verifier --dump-folder /dev/shm/dumps --print -- --tp-size 8`

    Parameters
    ----------
    model
        Hugging Face checkpoint folder of the verifier; its config.json decides the layers and the flags.
    dump_folder
        Where dumps go, best below /dev/shm; made with mode 0700.
    layers
        Hugging Face indices, comma-separated, the final one last. Default: 2, n/2, n-3, n.
    final_norm
        Whether the final state is dumped before or after the final norm.
    via
        Where the other states come from: the engine's own aux states, the layers' input norms, or the plugin, which leaves prefill
        graphs on. Default: by the model's architecture.
    port
        The server's port.
    python
        The interpreter of the environment that SGLang is installed in. Default: $DRAFTER_DATA_SGLANG_PYTHON, or python3.
    print_
        Print the command instead of running it.
    json
        The same as JSON, with the bytes that a token will take.
    """
    command = sglang_command(
        model,
        dump_folder,
        layers=parse_layers(layers) if layers else None,
        final_norm=final_norm,
        via=via,
        port=port,
        python=python,
        flags=more,
    )
    _print_or_run(command, dump_folder, print_=print_, json=json, program_option="--python")


def vllm(
    *more: MoreFlags,
    model: Path,
    dump_folder: Path,
    layers: str | None = None,
    port: Port = 8000,
    program: str | None = None,
    print_: Print = False,
    json: bool = False,
) -> None:
    """Start vLLM (0.32) on 127.0.0.1 so that it writes hidden states. What follows `--` goes to vLLM as it is.

    Example: `drafter-data engine vllm --model /models/verifier --dump-folder /dev/shm/dumps --print -- --max-model-len 8193`

    Parameters
    ----------
    model
        Hugging Face checkpoint folder of the verifier; its config.json decides the layers.
    dump_folder
        Where the files go, best below /dev/shm; made with mode 0700.
    layers
        Hugging Face indices, comma-separated, the final one last. Default: 2, n/2, n-3, n.
    port
        The server's port.
    program
        The `vllm` program. Default: $DRAFTER_DATA_VLLM, or vllm.
    print_
        Print the command instead of running it.
    json
        The same as JSON, with the bytes that a token will take.
    """
    command = vllm_command(
        model,
        dump_folder,
        layers=parse_layers(layers) if layers else None,
        port=port,
        program=(program,) if program else (),
        flags=more,
    )
    _print_or_run(command, dump_folder, print_=print_, json=json, program_option="--program")


def _print_or_run(command: LaunchCommand, dump_folder: Path, *, print_: bool, json: bool, program_option: str) -> None:
    if json:
        sys.stdout.write(json_format.dumps(command.as_dict(), indent=2) + "\n")
        return
    if print_:
        sys.stdout.write(command.shell() + "\n")
        return
    program = shutil.which(command.argv[0])
    if program is None:
        raise UsageError(
            f"no program {command.argv[0]} on PATH: name it with {program_option}, or print the command with --print and run it "
            "where the engine is installed",
            reason="engine-program-missing",
        )
    try:
        dump_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"dump folder {dump_folder} cannot be made: {error.strerror}", reason="dump-folder-not-writable"
        ) from error
    sys.stdout.flush()
    # In place: the server gets this process's id and signals.
    os.execve(program, list(command.argv), command.environment())  # noqa: S606 - no shell is the point
