"""A bare load generator: what an engine can do when its client does nothing else.

Bodies are encoded beforehand, `--in-flight` threads send them over connections that stay open, dumps are unlinked unread.
Prints {"seconds", "cpu_seconds", "samples", "tokens"}; the clock runs from the first request to the last reply.
"""

from __future__ import annotations

import argparse
import http.client
import json
import secrets
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.reporting import peak_rss_mb
from data_contracts.dump import RID_PREFIX, name_of, rid_prefix_of


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", type=Path, help="JSON list of lists of token ids")
    parser.add_argument("--url", required=True)
    parser.add_argument("--dump-folder", type=Path, required=True)
    parser.add_argument("--in-flight", type=int, required=True)
    parser.add_argument("--vllm-model", default="", help="speak vLLM's completions API with this served model name")
    options = parser.parse_args()
    prompts: list[list[int]] = json.loads(options.prompts.read_bytes())
    generator = _Generator(options.url, options.dump_folder, prompts, options.vllm_model)
    started, cpu = time.monotonic(), time.process_time()
    threads = [threading.Thread(target=generator.work) for _ in range(min(options.in_flight, len(prompts)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - started
    if generator.errors:
        sys.exit(f"{len(generator.errors)} requests failed, the first: {generator.errors[0]}")
    result = {
        "seconds": seconds,
        "cpu_seconds": time.process_time() - cpu,
        "samples": len(prompts),
        "tokens": sum(map(len, prompts)),
        "peak_rss_mb": peak_rss_mb(),
    }
    sys.stdout.write(json.dumps(result))


class _Generator:
    def __init__(self, url: str, dump_folder: Path, prompts: list[list[int]], vllm_model: str) -> None:
        self._address = urlsplit(url).netloc
        self._folder = dump_folder
        self._vllm = bool(vllm_model)
        run = secrets.token_hex(4)
        self._requests = [(f"{RID_PREFIX}{run}-{number}", len(ids)) for number, ids in enumerate(prompts)]
        self._bodies = [
            _vllm_body(ids, vllm_model) if vllm_model else _sglang_body(ids, rid)
            for ids, (rid, _) in zip(prompts, self._requests, strict=True)
        ]
        self._path = "/v1/completions" if vllm_model else "/generate"
        self._next = iter(range(len(prompts)))
        self._lock = threading.Lock()
        self.errors: list[str] = []

    def work(self) -> None:
        """One connection: sends until nothing is left."""
        connection = http.client.HTTPConnection(self._address)
        while True:
            with self._lock:
                number = next(self._next, None)
            if number is None:
                connection.close()
                return
            connection.request("POST", self._path, self._bodies[number], {"Content-Type": "application/json"})
            reply = connection.getresponse()
            text = reply.read()
            if reply.status != 200:
                self.errors.append(f"{reply.status}: {text[:300]!r}")
                continue
            self._unlink(number, text)

    def _unlink(self, number: int, text: bytes) -> None:
        if self._vllm:
            path = Path(json.loads(text)["kv_transfer_params"]["hidden_states_path"])
            _unlink_when_there(path)
            path.with_name(path.name + ".lock").unlink(missing_ok=True)
            return
        rid, tokens = self._requests[number]
        try:
            (self._folder / name_of(rid, 0, tokens)).unlink()
        except FileNotFoundError:  # it came in pieces
            for path in self._folder.glob(f"{rid_prefix_of(rid)}*"):
                path.unlink()


def _unlink_when_there(path: Path) -> None:
    """vLLM answers before the file is there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            path.unlink()
        except FileNotFoundError:
            time.sleep(0.002)
        else:
            return
    raise TimeoutError(f"no dump at {path}")


def _sglang_body(ids: list[int], rid: str) -> bytes:
    return json.dumps(
        {"input_ids": ids, "rid": rid, "extra_key": rid, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    ).encode()


def _vllm_body(ids: list[int], model: str) -> bytes:
    return json.dumps({"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0}).encode()


if __name__ == "__main__":
    main()
