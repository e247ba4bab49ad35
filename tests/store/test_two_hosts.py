"""A host that was taken for dead and goes on: its chunk is another's by now, and both bring the same states."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from drafter_data.files import xxh3_of
from drafter_data.store.store import Store
from tests.store.making import commit, dump_of, identity_of, ids_of, key_of


def test_state_that_another_host_brought_meanwhile_is_not_brought_twice(tmp_path: Path) -> None:
    sleeper, other = Store.open(tmp_path, identity_of()), Store.open(tmp_path, identity_of())
    ids = ids_of(20, 1)
    first = commit(other, ids, chunk="c")
    assert sleeper.find(key_of(ids)) is None, "it has not looked since"
    late = dump_of(ids)
    late = dump_of(ids, states_slh=late.states_slh * 1.0001)  # batching changes bits
    assert sleeper.commit(late, key_of(ids), ids, chunk="c") == first
    assert Counter(line.key for line in sleeper.receipt_lines()) == {bytes.fromhex(key_of(ids)): 1}
    assert xxh3_of(other.path_of(key_of(ids))) == first.xxh3, "and the file is the one that the receipt names"
