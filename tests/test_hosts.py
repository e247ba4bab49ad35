"""A host's own configuration: file, environment, and what it refuses."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from data_contracts.parameters import ChunkEngineParameters, EngineParameters
from drafter_data.errors import InputError
from drafter_data.hosts import this_host


def test_host_without_configuration_has_its_name_and_no_engine() -> None:
    host = this_host()
    assert (host.host_name, host.engine_url, host.dump_folder) == (socket.gethostname(), None, None)


def test_host_file_names_engine_and_dumps_and_a_variable_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "host.toml").write_text('engine_url = "http://127.0.0.1:30000"\ndump_folder = "/dev/shm/a"\nlease_seconds = 20\n')
    monkeypatch.setenv("DRAFTER_DATA_HOST_FILE", str(tmp_path / "host.toml"))
    monkeypatch.setenv("DRAFTER_DATA_DUMP_FOLDER", "/dev/shm/b")
    host = this_host()
    assert (host.engine_url, host.dump_folder, host.lease_seconds) == ("http://127.0.0.1:30000", "/dev/shm/b", 20)
    of_run = ChunkEngineParameters.of(EngineParameters(kind="sglang", url="http://parent:1", dump_folder="/parent", model="/m"))
    settings = host.engine(of_run)
    assert (settings.kind, settings.url, settings.dump_folder, settings.model) == ("sglang", host.engine_url, "/dev/shm/b", "/m")


def test_chunk_parameters_have_no_url_and_no_dump_folder() -> None:
    assert not {"url", "dump_folder"} & set(ChunkEngineParameters.model_fields)
    assert set(ChunkEngineParameters.model_fields) == set(EngineParameters.model_fields) - {"url", "dump_folder"}


@pytest.mark.parametrize("text", ["engine_ulr = 'x'", "lease_seconds = 0", "engine_url = "])
def test_host_file_with_a_fault_is_refused_with_its_name(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "host.toml").write_text(text)
    monkeypatch.setenv("DRAFTER_DATA_HOST_FILE", str(tmp_path / "host.toml"))
    with pytest.raises(InputError) as refused:
        this_host()
    assert refused.value.reason == "host-file"
    assert str(tmp_path / "host.toml") in str(refused.value)
