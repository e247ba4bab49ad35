"""What a host says of itself: its engine, its dump folder, its name. Never a flow's parameter: one queue serves many hosts.

A TOML file (`/etc/drafter-data/host.toml`, or what DRAFTER_DATA_HOST_FILE names) with any of the fields of `Host`; a variable
DRAFTER_DATA_<FIELD> in the worker's environment wins over the file.
"""

from __future__ import annotations

import os
import socket
import tomllib
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from data_contracts.parameters import ChunkEngineParameters, EngineParameters
from data_contracts.record import Record
from drafter_data.errors import InputError

FILE_VARIABLE = "DRAFTER_DATA_HOST_FILE"
DEFAULT_FILE = Path("/etc/drafter-data/host.toml")
LEASE_SECONDS = 60.0


class Host(Record):
    """One host's own configuration."""

    engine_url: str | None = Field(default=None, description="URL of this host's engine")
    dump_folder: str | None = Field(default=None, description="where this host's engine writes its dumps")
    model: str | None = Field(default=None, description="this host's copy of the checkpoint, where it is not the run's path")
    host_name: str = Field(default_factory=socket.gethostname, description="in leases; two containers of one name are one host")
    lease_seconds: float = Field(default=LEASE_SECONDS, ge=1, description="how long others wait for a chunk when this host dies")

    def engine(self, of_run: ChunkEngineParameters) -> EngineParameters:
        """The run's engine parameters, with URL, dump folder and model of this host."""
        settings = EngineParameters.model_validate(of_run.model_dump())
        return settings.model_copy(update=self._own())

    def fill(self, settings: EngineParameters) -> EngineParameters:
        """A run's own engine parameters, with this host's where they name no engine."""
        return settings if settings.url or not self.engine_url else settings.model_copy(update=self._own())

    def _own(self) -> dict[str, str]:
        own = {"url": self.engine_url, "dump_folder": self.dump_folder, "model": self.model}
        return {name: value for name, value in own.items() if value}


def this_host() -> Host:
    """Reads file and environment. Raises InputError (`host-file`) for a file that is no such configuration."""
    named = os.environ.get(FILE_VARIABLE)
    path = Path(named) if named else DEFAULT_FILE
    values = _file(path) if named or path.is_file() else {}
    for name in Host.model_fields:
        if value := os.environ.get(f"DRAFTER_DATA_{name.upper()}"):
            values[name] = value
    try:
        return Host.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(
            f"{path} or the environment: {'.'.join(map(str, first['loc']))}: {first['msg']}; known: {', '.join(Host.model_fields)}",
            reason="host-file",
        ) from error


def _file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: cannot be read as this host's configuration (TOML): {error}", reason="host-file") from error
