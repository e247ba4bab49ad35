"""Real engines on the CPU for the benchmarks, started as the tests start them; a missing environment is made."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from drafter_data.tokenising.builtin import BuiltinTokenizer
from tests.engines.servers import Configuration, Engines, Running
from tests.engines.tiny_models import make_llama

LAYERS = (2, 4, 5, 8)


@contextmanager
def sglang(work: Path) -> Generator[Running]:
    """SGLang with our capture and a Llama of 8 layers, hidden size 128, float32."""
    flags = ("--dtype", "float32")  # by itself it takes float16 for a float32 model
    with _running(work, Configuration("sglang", _model(work / "llama"), layers=LAYERS, flags=flags)) as running:
        yield running


@contextmanager
def vllm(work: Path) -> Generator[Running]:
    """vLLM with its hidden-states connector and the same model; no prefix cache, or a second run would find the first one's."""
    flags = ("--dtype", "float32", "--no-enable-prefix-caching")
    with _running(work, Configuration("vllm", _model(work / "llama"), engine="vllm", layers=LAYERS, flags=flags)) as running:
        yield running


def _model(folder: Path) -> Path:
    """The checkpoint with a tokenizer: vLLM does not start without."""
    make_llama(folder)
    source = BuiltinTokenizer().folder
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, folder / name)
    return folder


@contextmanager
def _running(work: Path, configuration: Configuration) -> Generator[Running]:
    engines = Engines(work)
    try:
        yield engines.running(configuration)
    finally:
        engines.stop()
