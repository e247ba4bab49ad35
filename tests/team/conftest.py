"""A PostgreSQL cluster of its own on loopback, as another user where the tests run as root, which PostgreSQL refuses to be."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from drafter_data.embedded.launch import free_port
from flows.local.services import CHECKOUT, Services
from tests.support.debian import install

OWNER = "postgres"


@dataclass(frozen=True)
class Cluster:
    """A running server with the database `prefect`."""

    port: int
    user: str
    password: str
    programs: Path

    @property
    def url(self) -> str:
        return f"postgresql+asyncpg://{self.user}:{self.password}@127.0.0.1:{self.port}/prefect"

    def ask(self, query: str) -> str:
        """The answer of psql, without decoration."""
        command = [self.programs / "psql", "-h", "127.0.0.1", "-p", str(self.port), "-U", self.user, "-d", "prefect", "-Atc", query]
        environment = {**os.environ, "PGPASSWORD": self.password}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="session")
def programs() -> Path:
    """Folder of initdb and postgres; Debian's package is installed where it is missing and may be."""
    if find_programs() is None:
        install("postgresql")
    return find_programs() or pytest.skip("apt-get installed no PostgreSQL server")


def find_programs() -> Path | None:
    candidates = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return candidates[-1].parent if candidates else None


@pytest.fixture
def cluster(programs: Path) -> Iterator[Cluster]:
    """Made, started, and removed."""
    as_owner: list[str] = []
    folder = Path(tempfile.mkdtemp(prefix="dd-postgres-"))  # not below pytest's folder, which only root may enter
    if os.geteuid() == 0:
        as_owner = ["runuser", "-u", OWNER, "--"]
        shutil.chown(folder, OWNER)
    made = Cluster(free_port(), "prefect", secrets.token_hex(16), programs)
    secret = folder / "password"
    secret.write_text(made.password)
    secret.chmod(0o644)  # the folder is closed to others
    data = str(folder / "data")

    def run(program: str, *arguments: str) -> None:
        done = subprocess.run([*as_owner, str(programs / program), *arguments], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, f"{program}: {done.stdout}{done.stderr}"

    run("initdb", "-D", data, "-U", made.user, "-A", "scram-sha-256", f"--pwfile={secret}", "--no-sync")
    options = f"-p {made.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder} -c fsync=off"
    run("pg_ctl", "-D", data, "-l", str(folder / "log"), "-w", "-o", options, "start")
    try:
        subprocess.run(
            [programs / "createdb", "-h", "127.0.0.1", "-p", str(made.port), "-U", made.user, "prefect"],
            env={**os.environ, "PGPASSWORD": made.password},
            check=True,
        )
        yield made
    finally:
        run("pg_ctl", "-D", data, "-m", "immediate", "stop")
        shutil.rmtree(folder)


def documented_settings() -> dict[str, str]:
    """Prefect's settings as docs/team.md writes them for server and worker."""
    blocks = re.findall(r"```ini\n(PREFECT_.*?)```", (CHECKOUT / "docs" / "team.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    lines = [line.partition("=") for block in blocks for line in block.splitlines() if line.startswith("PREFECT_")]
    return {name: value for name, _, value in lines}


@pytest.fixture
def team_services(cluster: Cluster, tmp_path: Path) -> Iterator[Services]:
    """Server on PostgreSQL with a password, heartbeats as often as Prefect allows, and a worker."""
    secret: Sequence[str] = ("admin", secrets.token_hex(8))
    settings = {
        **documented_settings(),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": cluster.url,
        "PREFECT_SERVER_API_AUTH_STRING": ":".join(secret),
        "PREFECT_API_AUTH_STRING": ":".join(secret),
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    }
    port = free_port()
    settings["PREFECT_API_URL"] = settings["PREFECT_UI_API_URL"] = f"http://127.0.0.1:{port}/api"
    started = Services(tmp_path / "prefect", port, settings)
    started.start(print)
    yield started
    started.stop()
