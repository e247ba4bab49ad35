"""State files are written right whatever the size of blocks, with direct writes and where the file system will not have them."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import numpy as np
import pytest

from drafter_data.store.state_writer import DIRECT_FROM_BYTES, StateWriter
from tests.store.mounts import small_tmpfs

SIZES = [0, 1, 4095, 4096, DIRECT_FROM_BYTES - 1, DIRECT_FROM_BYTES, DIRECT_FROM_BYTES + 1, 3 * DIRECT_FROM_BYTES + 8191]


def blocks_of(size: int) -> list[bytes]:
    """`size` random bytes in blocks of up to 3 MiB, most of them odd."""
    draw = np.random.default_rng(size)
    blocks = list[bytes]()
    while size:
        block = min(size, int(draw.choice([1, 248, 4096, 14336, 1 << 20, (1 << 20) - 12288, 3 << 20])))
        blocks.append(draw.bytes(block))
        size -= block
    return blocks


def written(path: Path, blocks: list[bytes]) -> bytes:
    writer = StateWriter(path, sum(map(len, blocks)), direct=True)
    try:
        for block in blocks:
            writer.room(len(block))[:] = block
            writer.took(len(block))
        writer.finish()
        os.fsync(writer.descriptor)
    finally:
        os.close(writer.descriptor)
    assert path.stat().st_mode & 0o777 == 0o444
    return path.read_bytes()


@pytest.mark.parametrize("size", SIZES)
def test_state_file_holds_what_was_put_in_whatever_the_blocks(tmp_path: Path, size: int) -> None:
    blocks = blocks_of(size)
    assert written(tmp_path / "state", blocks) == b"".join(blocks)


def test_large_state_is_written_past_the_page_cache_but_for_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    direct = list[tuple[bool, int]]()
    real_write = os.write

    def write(descriptor: int, data: memoryview) -> int:
        direct.append((bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT), len(data)))
        return real_write(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    blocks = blocks_of(2 * DIRECT_FROM_BYTES + 100)
    assert written(tmp_path / "state", blocks) == b"".join(blocks)
    if not direct[0][0]:
        pytest.skip("the file system of the temporary folder refuses direct writes")
    *first, (last_direct, _) = direct
    assert all(flag and size % 4096 == 0 for flag, size in first)
    assert not last_direct


@pytest.mark.parametrize("refused_at", ["open", "write"])
def test_file_system_that_refuses_direct_writes_gets_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused_at: str
) -> None:
    real_open, real_write, refused = os.open, os.write, list[str]()

    def refuse(direct: int, step: str) -> None:
        if direct & os.O_DIRECT and step == refused_at:
            refused.append(step)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def open_file(path: Path, flags: int, mode: int = 0o777) -> int:
        refuse(flags, "open")
        return real_open(path, flags, mode)

    def write(descriptor: int, data: memoryview) -> int:
        refuse(fcntl.fcntl(descriptor, fcntl.F_GETFL), "write")
        return real_write(descriptor, data)

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "write", write)
    blocks = blocks_of(2 * DIRECT_FROM_BYTES + 100)
    assert written(tmp_path / "state", blocks) == b"".join(blocks)
    assert len(refused) == 1


def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real_write(descriptor, data[: max(1, len(data) // 3 & ~511)]))
    blocks = blocks_of(DIRECT_FROM_BYTES + 5000)
    assert written(tmp_path / "state", blocks) == b"".join(blocks)


def test_ram_disk_takes_large_states_too(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "shm", "size=16M") as folder:
        blocks = blocks_of(DIRECT_FROM_BYTES + 5000)
        assert written(folder / "state", blocks) == b"".join(blocks)
