"""`drafter-data engine embedded|...`: starts an inference server that dumps hidden states."""

from __future__ import annotations

import json as json_format
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number

from data_contracts.identity import FinalNorm
from drafter_data.embedded.checkpoint import ensure_checkpoint
from drafter_data.embedded.launch import SINGLE_THREADED, settings_command
from drafter_data.embedded.settings import ServerSettings, parse_layers

app = App(name="engine", help="Start an inference server that dumps hidden states.")
app.command("drafter_data.cli.engine_servers:sglang", name="sglang")
app.command("drafter_data.cli.engine_servers:vllm", name="vllm")
AtLeastOne = Annotated[int, Parameter(validator=Number(gte=1))]


@app.command
def embedded(
    *,
    dump_folder: Path,
    model: Path | None = None,
    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535))] = 0,
    dumps: Literal["labelled", "unlabelled"] = "labelled",
    final_norm: FinalNorm = "pre",
    layers: str | None = None,
    max_prefill_tokens: AtLeastOne = 8192,
    prefill_max_requests: AtLeastOne | None = None,
    chunked_prefill_size: int = 8192,
    max_running_requests: AtLeastOne = 256,
    skip_server_warmup: Annotated[bool, Parameter(negative="")] = False,
    request_log: Path | None = None,
    timed: Annotated[bool, Parameter(negative="")] = False,
    timed_base_ms: float = 20.0,
    timed_us_per_token: float = 25.0,
    hidden_size: AtLeastOne = 4096,
    num_layers: AtLeastOne = 32,
    dtype: Literal["bf16", "fp32"] = "bf16",
    context_length: AtLeastOne = 131_072,
    fault: tuple[str, ...] = (),
    faults: Path | None = None,
    print_: Annotated[bool, Parameter(name="--print", negative="")] = False,
    json: bool = False,
) -> None:
    """Serve a small Llama model in NumPy on 127.0.0.1, in the form of SGLang's API; prints `ready on URL`, ends with Ctrl-C.

    Example: `drafter-data engine embedded --dump-folder /dev/shm/demo-dumps --port 30000`

    Parameters
    ----------
    dump_folder
        Where dumps go; made with mode 0700.
    model
        Hugging Face folder of a small Llama model. Default: one made from a seed on first use, kept in the user's cache.
    port
        0 takes a free one.
    dumps
        `labelled`: one file a request and pass, for requests whose rid begins with `dd-`. `unlabelled`: one folder a pass, whatever
        was in it, as older patches of SGLang leave it.
    final_norm
        Whether the final state is dumped before or after the final norm.
    layers
        Hugging Face indices, comma-separated, the final one last. Default: 2, n/2, n-3, n.
    max_prefill_tokens
        Most tokens a prefill pass takes from waiting requests.
    prefill_max_requests
        Most requests in a prefill pass; 1 keeps requests from sharing a pass.
    chunked_prefill_size
        Most tokens in a prefill pass; longer prompts are cut. -1: no chunking.
    max_running_requests
        Most requests that decode at once.
    skip_server_warmup
        No warm-up request at the start.
    request_log
        File that gets one JSON line a request: rid, tokens, state_key, time.
    timed
        Compute nothing: answer after base + tokens x rate with dumps of the size that the next options say. For benchmarks.
    timed_base_ms
        Milliseconds a pass.
    timed_us_per_token
        Microseconds a token of a pass.
    hidden_size
        With --timed: hidden size.
    num_layers
        With --timed: number of layers.
    dtype
        With --timed: dtype of the dumps.
    context_length
        With --timed: longest context.
    fault
        A fault for tests, `NAME` or `NAME:rate`, for example `nan:0.02`; may be given several times.
    faults
        A JSON script of faults for tests, read again whenever it changes.
    print_
        Print the command and its environment instead of running it.
    json
        The same as JSON.
    """
    settings = ServerSettings(
        dump_folder=dump_folder,
        model=model if model is not None or timed else ensure_checkpoint(cached_model()),
        port=port,
        dumps=dumps,
        final_norm=final_norm,
        layers=parse_layers(layers) if layers else None,
        max_prefill_tokens=max_prefill_tokens,
        prefill_max_requests=prefill_max_requests,
        chunked_prefill_size=chunked_prefill_size,
        max_running_requests=max_running_requests,
        skip_server_warmup=skip_server_warmup,
        request_log=request_log,
        timed=timed,
        timed_base_ms=timed_base_ms,
        timed_us_per_token=timed_us_per_token,
        hidden_size=hidden_size,
        num_layers=num_layers,
        dtype=dtype,
        context_length=context_length,
        fault=fault,
        faults=faults,
    )
    argv = settings_command(settings)
    if json:
        sys.stdout.write(json_format.dumps({"argv": argv, "env": SINGLE_THREADED}, indent=2) + "\n")
    elif print_:
        variables = [f"{name}={value}" for name, value in SINGLE_THREADED.items()]
        sys.stdout.write(" ".join([*variables, shlex.join(argv)]) + "\n")
    else:
        sys.stdout.flush()
        # In place: the server gets this process's id and signals, and an environment that NumPy reads only at its start.
        os.execve(argv[0], argv, {**os.environ, **SINGLE_THREADED})  # noqa: S606 - no shell is the point


def cached_model() -> Path:
    """Where the seed's checkpoint is kept when no model is named."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "drafter-data" / "embedded-model-0"
