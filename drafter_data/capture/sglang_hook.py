"""Writes the hidden states of an unpatched SGLang to a dump folder, through `--forward-hooks`.

One self-contained file that runs inside the server's scheduler process and environment: torch and the standard library, nothing of
drafter-data. Put its folder on PYTHONPATH, or copy the file. `drafter-data engine sglang --print` prints the flags.

For every extend (prefill) pass and every request whose id begins with RID_PREFIX, one file appears under its final name when it is
whole: safetensors, `token_ids` int64 [rows], then `hidden_states` [rows, L, H] in the model's dtype, the rows `start..end` of the
prompt. The reply's `meta_info["drafter_data"]` says so, or what went wrong: no exception ever leaves a hook, since it would end the
server. The constants repeat data_contracts/dump.py; a test holds them equal.

What is read from SGLang (0.5.23): `logits_processor` is called with (input_ids, final_hidden_th, lm_head, ForwardBatch, aux); the
final norm with (hidden, residual) and returns (normed, residual), the second being the state before the norm; a layer's
`input_layernorm` likewise, the second being the state before that layer, which Hugging Face calls hidden_states[layer].

Tensor legend: T rows of a pass (all its requests, one after another), S rows of one request, L stored layers, H hidden size.
"""

import contextlib
import ctypes
import hashlib
import json
import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

import torch

DUMP_VERSION = 1
RID_PREFIX = "dd-"
FILE_PREFIX = "dd1-"
TEMPORARY_PREFIX = ".tmp-"
HEADER_BYTES = 1024
ACKNOWLEDGEMENT = "drafter_data"

SELF_CHECK_LIMIT = {torch.float32: 1e-4}
SELF_CHECK_LIMIT_HALF = 1e-2
SELF_CHECK_ROWS = 256
WAIT_SECONDS = 60.0
PINNED_BUFFERS = 3
WRITER_THREADS = 4
LEFT_OVER_SECONDS = 10.0
REMEMBERED_ERRORS = 4096

_DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_log = logging.getLogger("drafter_data.capture")


# ---------------------------------------------------------------------------------------------- what --forward-hooks names
def final_norm(config):
    """Hook factory for the final norm (`*.norm`)."""
    return _capture_of(config).on_norm


def layer_input(config):
    """Hook factory for one layer's `input_layernorm`; `config["layer"]` is that layer's number."""
    return _capture_of(config).on_layer_input(int(config["layer"]))


def logits(config):
    """Hook factory for `logits_processor`, where a pass is complete."""
    return _capture_of(config).on_logits


_captures = {}


def _capture_of(config):
    """The process's one capture. Raises at start (the server then does not start) for a configuration that cannot work."""
    settings = {name: value for name, value in config.items() if name != "layer"}
    key = json.dumps(settings, sort_keys=True)
    if key not in _captures:
        if _captures:
            raise ValueError(f"drafter-data: hooks with different configurations: {key} and {next(iter(_captures))}")
        _captures[key] = Capture(settings)
    return _captures[key]


class Capture:
    """Collects the columns of a pass from the hooks and writes them at its end.

    config: `version` 1; `dump_folder` absolute; `layers` ascending Hugging Face indices, the model's depth last; `final_norm`
    "pre" or "post"; `via` "aux" (the engine's own aux states) or "input_layernorm"; `writer_threads` (0 = write before going on).
    """

    def __init__(self, config):
        known = {"version", "dump_folder", "layers", "final_norm", "via", "writer_threads"}
        if set(config) - known or config.get("version") != DUMP_VERSION:
            raise ValueError(f"drafter-data hook of version {DUMP_VERSION} cannot use the configuration {config}")
        self.layers = [int(layer) for layer in config["layers"]]
        if len(self.layers) < 1 or self.layers != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ValueError(f"drafter-data: layers must be distinct and ascending, found {self.layers}")
        self.pre_norm = {"pre": True, "post": False}[config.get("final_norm", "pre")]
        self.via_aux = {"aux": True, "input_layernorm": False}[config.get("via", "aux")]
        self.writer_threads = config.get("writer_threads")
        self.folder = config["dump_folder"]
        if not Path(self.folder).is_absolute():
            raise ValueError(f"drafter-data: dump_folder must be absolute, found {self.folder!r}")
        Path(self.folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep_temporaries(self.folder)
        self.metadata = {
            "layers": ",".join(map(str, self.layers)),
            "final_norm": "pre" if self.pre_norm else "post",
            "version": str(DUMP_VERSION),
        }
        self._norm = None  # (module, state before the norm) of the running pass
        self._inputs = {}
        self._proven = False
        self._failed = OrderedDict()  # request id -> first error of its earlier pieces
        self._staging = None

    # ------------------------------------------------------------------------------------------ hooks
    def on_norm(self, module, args, output):
        """Keeps the state before the final norm. A copy: the kernels after it may work in place."""
        try:
            if self.pre_norm and not _is_capturing(args):
                before_th = output[1] if isinstance(output, tuple) else args[0]
                self._norm = (module, before_th.clone())
        except Exception:  # noqa: BLE001 - see the module's docstring
            _log.exception("drafter-data: final norm hook")

    def on_layer_input(self, layer):
        """Keeps the state before a layer: what is stored, or, with the engine's own aux states, what proves them once."""

        def hook(_module, args, output):
            try:
                if not (self.via_aux and self._proven) and not _is_capturing(args):
                    before_th = output[1] if isinstance(output, tuple) else args[0]
                    self._inputs[layer] = before_th.clone()
            except Exception:  # noqa: BLE001 - see the module's docstring
                _log.exception("drafter-data: input_layernorm hook of layer %d", layer)

        return hook

    def on_logits(self, _module, args, output):
        """End of a pass: writes each of our requests' rows and acknowledges."""
        norm, inputs = self._norm, self._inputs
        self._norm, self._inputs = None, {}
        try:
            batch = args[3]
            if not batch.forward_mode.is_extend() or batch.rids is None:
                return
            aux = args[4] if len(args) > 4 else None
            self.on_pass(batch, args[0], args[1], aux, norm, inputs, output)
        except Exception:  # noqa: BLE001 - see the module's docstring
            _log.exception("drafter-data: logits_processor hook")

    def on_pass(self, batch, input_ids_t, final_th, aux, norm, inputs, output):
        """The same for a pass whose parts are already at hand (the plugin)."""
        pieces = _pieces_of(batch)
        if not pieces or _attention_tp_rank() != 0:
            return
        acks = Acknowledgements(len(batch.rids))
        try:
            ids_t = batch.input_ids if batch.input_ids is not None else input_ids_t
            columns = self._columns(final_th, aux, norm, inputs)
            self._check_rows(pieces, [*columns, ids_t])
            if not self._proven:
                self._prove(columns, final_th, norm, inputs)
            self._stage_and_write(pieces, columns, ids_t, acks)
        except Exception as error:  # noqa: BLE001 - see the module's docstring
            _log.exception("drafter-data: pass with %s", pieces[0].rid)
            for piece in pieces:
                acks[piece.index] = piece.acknowledge(self._failed, error)
        output.customized_info = {**(output.customized_info or {}), ACKNOWLEDGEMENT: acks}

    # ------------------------------------------------------------------------------------------ columns
    def _columns(self, final_th, aux, norm, inputs):
        """The stored layers as [T, H] tensors, in the order of `layers`."""
        wanted = len(self.layers) - 1
        hidden = final_th.shape[-1]
        if not self.via_aux:
            missing = [layer for layer in self.layers[:-1] if layer not in inputs]
            if missing:
                raise RuntimeError(f"input_layernorm of layers {missing} was not seen in this pass: wrong module pattern")
            columns = [inputs[layer] for layer in self.layers[:-1]]
        elif aux is None:
            columns = []
        elif isinstance(aux, (list, tuple)):
            columns = list(aux)
        else:
            columns = list(aux.split(hidden, dim=-1))
        if len(columns) != wanted:
            raise RuntimeError(
                f"expected {wanted} aux states for layers {self.layers[:-1]}, the engine gave {len(columns)}: "
                "--enable-return-aux-hidden-states --speculative-algorithm EAGLE3 --return-aux-hidden-state-layer-ids"
            )
        if self.pre_norm and norm is None:
            raise RuntimeError("the final norm's hook was not called in this pass: wrong module pattern, or a fused norm")
        return [*columns, norm[1] if self.pre_norm else final_th]

    def _check_rows(self, pieces, tensors):
        rows = max(piece.last for piece in pieces)
        for tensor in tensors:
            if tensor.shape[0] < rows:
                raise RuntimeError(f"a pass of {rows} rows came with {tensor.shape[0]}: sharded states cannot be captured")

    def _prove(self, columns, final_th, norm, inputs):
        """The self-check, on the first pass: the columns are what they are called. Raises RuntimeError."""
        limit = SELF_CHECK_LIMIT.get(final_th.dtype, SELF_CHECK_LIMIT_HALF)
        errors = {}
        if self.pre_norm:
            module, before_th = norm
            normed_th = module.forward(before_th[:SELF_CHECK_ROWS].clone())
            normed_th = normed_th[0] if isinstance(normed_th, tuple) else normed_th
            errors["final_norm pre (start with final_norm post)"] = _relative_error(normed_th, final_th)
        if self.via_aux:
            for layer, column_th in zip(self.layers[:-1], columns[:-1], strict=True):
                seen_th = inputs.get(layer)
                if seen_th is not None and seen_th.shape == column_th.shape:
                    errors[f"layer {layer} (wrong --return-aux-hidden-state-layer-ids)"] = _relative_error(column_th, seen_th)
        wrong = {name: error for name, error in errors.items() if not error <= limit}
        if wrong:
            found = "; ".join(f"{name} differs by {error:.1e}" for name, error in wrong.items())
            raise RuntimeError(f"self-check (limit {limit:.0e}): {found}")
        self._proven = True
        shown = ", ".join(f"{name.split(' (')[0]} {error:.1e}" for name, error in errors.items())
        _log.warning("drafter-data: capturing layers %s into %s; self-check: %s", self.layers, self.folder, shown)

    # ------------------------------------------------------------------------------------------ to the host, to files
    def _stage_and_write(self, pieces, columns, ids_t, acks):
        rows = sum(piece.rows for piece in pieces)
        like = columns[-1]
        states_slh = torch.empty((rows, len(columns), like.shape[-1]), dtype=like.dtype, device=like.device)
        ids_s = torch.empty(rows, dtype=torch.int64, device=ids_t.device)
        at = 0
        for piece in pieces:
            for k, column_th in enumerate(columns):
                states_slh[at : at + piece.rows, k].copy_(column_th[piece.first : piece.last])
            ids_s[at : at + piece.rows].copy_(ids_t[piece.first : piece.last])
            piece.staged = slice(at, at + piece.rows)
            at += piece.rows
        if self._staging is None:
            threads = self.writer_threads if self.writer_threads is not None else WRITER_THREADS * states_slh.is_cuda
            self._staging = Staging(states_slh.device, threads)
        self._staging.run(states_slh, ids_s, pieces, self._write, acks, self._failed)

    def _write(self, piece, states_slh, ids_s):
        """One file: temporary name in the dump folder, whole content, rename."""
        metadata = {"rid": piece.rid, "start": str(piece.start), "end": str(piece.end), **self.metadata}
        parts = (header_of(states_slh, metadata), bytes_of(ids_s), bytes_of(states_slh))
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            final = name_of(piece.rid, piece.start, piece.end)
            temporary = f"{TEMPORARY_PREFIX}{final}.{os.getpid()}.{threading.get_ident()}"
            descriptor = os.open(
                temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder
            )
            try:
                with os.fdopen(descriptor, "wb", buffering=0) as handle:
                    for part in parts:
                        view = memoryview(part)
                        while view:
                            view = view[handle.write(view) :]
                os.rename(temporary, final, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                os.unlink(temporary, dir_fd=folder)
                raise
        finally:
            os.close(folder)


class Piece:
    """One request's share of a pass: its index in the batch, its rows in the pass and in the prompt."""

    def __init__(self, index, rid, first, start, rows):
        self.index, self.rid, self.rows = index, rid, rows
        self.first, self.last = first, first + rows
        self.start, self.end = start, start + rows
        self.staged = slice(0, 0)

    def acknowledge(self, failed, error=None):
        """What the client is told. Only the last piece's word arrives, so it repeats what an earlier piece met."""
        if error is not None:
            text = f"rows {self.start}..{self.end}: {type(error).__name__}: {error}"[:400]
            failed.setdefault(self.rid, text)
            while len(failed) > REMEMBERED_ERRORS:
                failed.popitem(last=False)
        return {"version": DUMP_VERSION, "start": self.start, "end": self.end, "error": failed.get(self.rid, "")}


class Acknowledgements(list):
    """One value a request of the pass. A value may be a promise, kept when its file is there.

    SGLang takes the values when it handles the finished pass, which is while the next pass runs: waiting here stalls no forward
    pass, makes each acknowledgement true, and bounds how far writing may fall behind.
    """

    def __init__(self, requests):
        super().__init__([None] * requests)

    def __getitem__(self, index):
        value = super().__getitem__(index)
        return value.kept() if isinstance(value, Promise) else value


class Promise:
    """An acknowledgement that a writer thread will give."""

    def __init__(self, future, piece, failed):
        self._future, self._piece, self._failed = future, piece, failed

    def kept(self):
        """Waits within a bound, and then says that the file is late: an exception here would end the server."""
        try:
            return self._future.result(timeout=WAIT_SECONDS)
        except FutureTimeoutError:
            return self._piece.acknowledge(self._failed, TimeoutError(f"not written within {WAIT_SECONDS:g} s"))


class Staging:
    """Takes a pass's rows to the host and has them written.

    On a CPU, or with no threads, at once. On CUDA: copied by a side stream into one of PINNED_BUFFERS pinned buffers, written by
    threads; when all buffers are in use, the pass waits for one, which bounds memory.
    """

    def __init__(self, device, threads):
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="drafter-data") if threads else None
        self._buffers = queue.Queue()
        for _ in range(PINNED_BUFFERS):
            self._buffers.put(None)

    def run(self, states_slh, ids_s, pieces, write, acks, failed):
        if self._pool is None:
            for piece in pieces:
                acks[piece.index] = self._attempt(piece, write, states_slh.cpu(), ids_s.cpu(), failed)
            return
        buffer = self._buffers.get(timeout=WAIT_SECONDS)
        host = (states_slh, ids_s, None)
        try:
            if self._cuda:
                buffer, host = self._copy_off(buffer, states_slh, ids_s)
        except BaseException:
            self._buffers.put(buffer)
            raise
        left = _Countdown(len(pieces), lambda: self._buffers.put(buffer))
        for piece in pieces:
            future = self._pool.submit(self._finish, piece, write, host, failed, left)
            acks[piece.index] = Promise(future, piece, failed)

    def _copy_off(self, buffer, states_slh, ids_s):
        needed = states_slh.nbytes + ids_s.nbytes
        if buffer is None or buffer.numel() < needed:
            buffer = torch.empty(1 << (needed - 1).bit_length(), dtype=torch.uint8, pin_memory=True)
        ids_host = buffer[: ids_s.nbytes].view(torch.int64)
        states_host = buffer[ids_s.nbytes : needed].view(states_slh.dtype).view(states_slh.shape)
        self._stream.wait_stream(torch.cuda.current_stream(states_slh.device))
        with torch.cuda.stream(self._stream):
            ids_host.copy_(ids_s, non_blocking=True)
            states_host.copy_(states_slh, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        for tensor in (states_slh, ids_s):
            tensor.record_stream(self._stream)
        return buffer, (states_host, ids_host, done)

    def _finish(self, piece, write, host, failed, left):
        states_slh, ids_s, done = host
        try:
            if done is not None:
                done.synchronize()
            return self._attempt(piece, write, states_slh, ids_s, failed)
        except Exception as error:  # noqa: BLE001 - see the module's docstring
            return piece.acknowledge(failed, error)
        finally:
            left.one_less()

    def _attempt(self, piece, write, states_slh, ids_s, failed):
        try:
            write(piece, states_slh[piece.staged], ids_s[piece.staged])
        except Exception as error:  # noqa: BLE001 - see the module's docstring
            _log.exception("drafter-data: writing rows %d..%d of %s", piece.start, piece.end, piece.rid)
            return piece.acknowledge(failed, error)
        return piece.acknowledge(failed)


class _Countdown:
    def __init__(self, count, at_zero):
        self._count, self._at_zero, self._lock = count, at_zero, threading.Lock()

    def one_less(self):
        with self._lock:
            self._count -= 1
            last = self._count == 0
        if last:
            self._at_zero()


# ---------------------------------------------------------------------------------------------- names and bytes
def name_of(rid, start, end):
    """File name of the rows `start..end` of a request. The id is hashed: it never becomes part of a path."""
    return f"{FILE_PREFIX}{hashlib.blake2b(rid.encode(), digest_size=20).hexdigest()}-{start:08d}-{end:08d}.safetensors"


def _sweep_temporaries(folder):
    """Removes what a server that was killed in the middle of a file left: our temporary names, their process gone."""
    for entry in os.scandir(folder):
        parts = entry.name.rsplit(".", 2)
        if not entry.name.startswith(TEMPORARY_PREFIX + FILE_PREFIX) or len(parts) != 3 or not parts[1].isdigit():
            continue
        with contextlib.suppress(FileNotFoundError):
            old = time.time() - entry.stat(follow_symlinks=False).st_mtime > LEFT_OVER_SECONDS
            if old and not Path(f"/proc/{parts[1]}").exists():
                Path(entry.path).unlink()


def header_of(states_slh, metadata):
    """The safetensors header of a dump, HEADER_BYTES long in all (https://huggingface.co/docs/safetensors)."""
    rows = states_slh.shape[0]
    header = {
        "__metadata__": metadata,
        "token_ids": {"dtype": "I64", "shape": [rows], "data_offsets": [0, 8 * rows]},
        "hidden_states": {
            "dtype": _DTYPE_NAMES[states_slh.dtype],
            "shape": list(states_slh.shape),
            "data_offsets": [8 * rows, 8 * rows + states_slh.nbytes],
        },
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > HEADER_BYTES - 8:
        raise ValueError(f"header of {len(text)} bytes: the request id is too long")
    return (HEADER_BYTES - 8).to_bytes(8, "little") + text.ljust(HEADER_BYTES - 8)


def bytes_of(tensor):
    """The memory of a contiguous host tensor, without NumPy (which has no bfloat16). Keep the tensor while it is used."""
    tensor = tensor.contiguous()
    block = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    block.tensor = tensor
    return memoryview(block).cast("B")


# ---------------------------------------------------------------------------------------------- what is asked of SGLang
def _pieces_of(batch):
    """Our requests in this pass."""
    pieces, first = [], 0
    for index, rid in enumerate(batch.rids):
        rows = int(batch.extend_seq_lens_cpu[index])
        if rid.startswith(RID_PREFIX) and rows > 0:
            pieces.append(Piece(index, rid, first, int(batch.extend_prefix_lens_cpu[index]), rows))
        first += rows
    return pieces


def _attention_tp_rank():
    """Rank within the group that shares a request's rows: rank 0 of every DP rank writes."""
    try:
        from sglang.srt.runtime_context import get_parallel

        return get_parallel().attn_tp_rank
    except ImportError:
        from sglang.srt.layers.dp_attention import get_attention_tp_rank

        return get_attention_tp_rank()


def _relative_error(found_th, expected_th):
    """Relative Frobenius distance over the first rows."""
    found_th, expected_th = found_th[:SELF_CHECK_ROWS].float(), expected_th[:SELF_CHECK_ROWS].float()
    return float((found_th - expected_th).norm() / expected_th.norm())


def _is_capturing(args):
    return bool(args) and args[0].is_cuda and torch.cuda.is_current_stream_capturing()
