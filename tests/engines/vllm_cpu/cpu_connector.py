"""Tests only: vLLM's hidden-states connector without CUDA streams and pinned memory, which the stock one needs.

Loaded by the server through `kv_connector_module_path`. Rows are gathered at once, and written by the stock writer in its threads,
under its lock, so that what a client sees is the stock behaviour.
"""

import fcntl
import os
from functools import partial
from pathlib import Path

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class Happened:
    """Stands in for a CUDA event whose work is done."""

    def query(self):
        return True

    def synchronize(self):
        return None


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    def _submit_async_write(self, pending):
        if not self._is_tp_rank_zero:
            return
        within = torch.arange(self._block_size)
        slots = (torch.tensor(pending.block_ids)[:, None] * self._block_size + within).flatten()
        rows = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).clone()
        tensors = {"hidden_states": rows.contiguous(), "token_ids": pending.token_ids.clone()}
        Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is None and self.use_lock:
            lock = os.open(pending.filename + ".lock", os.O_CREAT | os.O_WRONLY, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        done = Happened()
        future = self._executor.submit(self._write_tensors, tensors, done, pending.filename, lock)
        self._req_copy_events[pending.req_id] = done
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))
