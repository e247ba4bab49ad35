"""The HTTP side under bad input, clients that leave, and signals."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from data_contracts.dump import TEMPORARY_PREFIX
from drafter_data.embedded.launch import SINGLE_THREADED
from tests.embedded.conftest import RunningEngine

Start = Callable[..., RunningEngine]

BAD_PAYLOADS: list[tuple[Any, str]] = [
    ([], "object"),
    ({}, "input_ids"),
    ({"text": "hello"}, "input_ids"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [[1, 2], [3]]}, "integers"),
    ({"input_ids": [1, True]}, "integers"),
    ({"input_ids": [1, 2.5]}, "integers"),
    ({"input_ids": [1, "2"]}, "integers"),
    ({"input_ids": "1,2"}, "input_ids"),
    ({"input_ids": [1, 1024]}, "vocabulary"),
    ({"input_ids": [-1]}, "vocabulary"),
    ({"input_ids": [10**30]}, "vocabulary"),
    ({"input_ids": [1] * 2048}, "2047"),
    ({"input_ids": [1], "rid": 5}, "rid"),
    ({"input_ids": [1], "rid": "x" * 2000}, "rid"),
    ({"input_ids": [1], "extra_key": 5}, "extra_key"),
    ({"input_ids": [1], "stream": True}, "stream"),
    ({"input_ids": [1], "sampling_params": [1]}, "sampling_params"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": "8"}}, "max_new_tokens"),
    ({"input_ids": [1], "sampling_params": {"temperature": float("nan")}}, "temperature"),
    ({"input_ids": [1], "sampling_params": {"temperature": "hot"}}, "temperature"),
    ({"input_ids": [1], "return_logprob": True, "top_logprobs_num": 5000}, "top_logprobs_num"),
    ({"input_ids": [1], "logprob_start_len": 9}, "logprob_start_len"),
]
BAD_BODIES = [b"", b"{", b"\xff\xfe", b"[" * 200_000, b'{"input_ids": [1', b"null", b'"text"', b"1" * 10_000]


def test_bad_bodies_are_answered_with_one_line_on_a_connection_that_stays(start_engine: Start) -> None:
    engine = start_engine()
    connection = http.client.HTTPConnection("127.0.0.1", int(engine.url.rpartition(":")[2]), timeout=30)

    def post(body: bytes) -> tuple[int, dict[str, Any]]:
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())

    for payload, word in BAD_PAYLOADS:
        status, answer = post(json.dumps(payload).encode())
        assert status == 400, payload
        assert word in answer["error"]["message"], answer
        assert "\n" not in answer["error"]["message"]
    for body in BAD_BODIES:
        status, answer = post(body)
        assert (status, answer["error"]["type"]) == (400, "BadRequestError")
    assert post(b'{"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}')[0] == 200
    assert len(engine.logged()) == 1, "refused requests reach no pass"
    assert "Traceback" not in engine.process.log.read_text()


def raw(engine: RunningEngine, data: bytes) -> bytes:
    """All bytes that the server answers to raw bytes before it closes (or nothing comes for a second)."""
    with socket.create_connection(("127.0.0.1", int(engine.url.rpartition(":")[2])), timeout=2) as client:
        client.sendall(data)
        answer = b""
        try:
            while block := client.recv(65536):
                answer += block
        except TimeoutError:
            pass
    return answer


def test_bad_http_is_refused_and_the_server_goes_on(start_engine: Start) -> None:
    engine = start_engine()
    assert b" 413 " in raw(engine, b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
    assert b" 413 " in raw(engine, b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n")
    assert b" 411 " in raw(engine, b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
    assert b" 404 " in raw(engine, b"GET /nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert b" 405 " in raw(engine, b"GET /generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert b" 501 " in raw(engine, b"BREW /generate HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b" 400 " in raw(engine, b"\x16\x03\x01garbage garbage\r\n\r\n")
    assert raw(engine, b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{") == b""
    twice = b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n" * 2
    assert raw(engine, twice).count(b"HTTP/1.1 200") == 2, "requests sent ahead are answered in order"
    assert engine.generate([1, 2])["output_ids"]
    assert "Traceback" not in engine.process.log.read_text()


def test_health_flush_and_info(start_engine: Start, checkpoint: Path) -> None:
    engine = start_engine("--prefill-max-requests", "1", "--chunked-prefill-size", "-1")
    for path in ("/ready", "/health", "/health_generate"):
        assert engine.get(path).status_code == 200
    assert engine.post({}, "/flush_cache").status_code == 200
    info = engine.get("/server_info").json()
    expected = {
        "prefill_max_requests": 1, "chunked_prefill_size": -1, "disable_radix_cache": True, "tp_size": 1, "dtype": "float32",
        "model_path": str(checkpoint), "max_req_input_len": 2047, "max_prefill_tokens": 8192, "skip_server_warmup": False,
    }  # fmt: skip
    assert {name: info[name] for name in expected} == expected
    assert info["drafter_data"] == {
        "dump_version": 1, "dump_folder": str(engine.dumps), "layers": [2, 4, 5, 8], "final_norm": "pre", "dumps": "labelled",
        "hidden_size": 64, "num_layers": 8, "timed": False,
    }  # fmt: skip


def test_rid_in_flight_twice_is_refused(start_engine: Start) -> None:
    engine = start_engine("--timed", "--timed-base-ms", "1500", "--skip-server-warmup")
    payload = {"input_ids": [1], "rid": "dd-same", "sampling_params": {"max_new_tokens": 1}}
    with ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(lambda _: engine.post(payload), range(2)))
    assert sorted(reply.status_code for reply in replies) == [200, 400]
    assert engine.post(payload).status_code == 200, "it may come again once it is answered"


def test_clients_that_leave_do_not_hold_up_others(start_engine: Start) -> None:
    engine = start_engine("--timed", "--timed-base-ms", "400", "--prefill-max-requests", "1", "--hidden-size", "64")
    port = int(engine.url.rpartition(":")[2])
    body = json.dumps({"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}).encode()
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(30)]
    for client in clients:
        client.sendall(head + body)
    deadline = time.monotonic() + 30
    while len(engine.logged()) < 30 and time.monotonic() < deadline:
        time.sleep(0.02)
    for client in clients:
        client.close()
    started = time.monotonic()
    engine.generate([1, 2], "dd-after")
    assert time.monotonic() - started < 30 * 0.4 * 0.6, "what waited for clients that have gone was dropped"


def test_thirty_two_clients_with_some_leaving_lose_no_reply(start_engine: Start) -> None:
    engine = start_engine("--chunked-prefill-size", "300")
    port = int(engine.url.rpartition(":")[2])
    stop = threading.Event()

    def leave() -> None:
        body = json.dumps({"input_ids": [4] * 500, "rid": f"dd-gone-{time.time_ns()}", "sampling_params": {}}).encode()
        while not stop.wait(0.02):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    leaver = threading.Thread(target=leave)
    leaver.start()
    try:
        with ThreadPoolExecutor(32) as pool:
            replies = list(pool.map(lambda n: engine.generate([n % 1000 + 5] * (1 + n % 400), f"dd-{n}"), range(160)))
    finally:
        stop.set()
        leaver.join()
    assert [reply["meta_info"]["prompt_tokens"] for reply in replies] == [1 + n % 400 for n in range(160)]
    assert all(len(engine.states(f"dd-{n}")) == 1 + n % 400 for n in range(160))
    assert "Traceback" not in engine.process.log.read_text()


def test_sigterm_under_load_stops_quickly_and_leaves_no_temporary_file(start_engine: Start) -> None:
    engine = start_engine()
    failures: list[Exception] = []

    def send(number: int) -> None:
        try:
            engine.generate([number + 5] * 400, f"dd-{number}")
        except Exception as error:
            failures.append(error)

    with ThreadPoolExecutor(32) as pool:
        futures = [pool.submit(send, number) for number in range(300)]
        while len(list(engine.dumps.glob("dd1-*"))) < 20:
            time.sleep(0.01)
        started = time.monotonic()
        os.killpg(engine.process.pid, signal.SIGTERM)
        while engine.process.alive():
            assert time.monotonic() - started < 8
            time.sleep(0.01)
        for future in futures:
            future.result()
    assert failures, "the load outlasted the server"
    assert [path.name for path in engine.dumps.iterdir() if path.name.startswith(TEMPORARY_PREFIX)] == []
    assert "Traceback" not in engine.process.log.read_text()


def run_engine(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "drafter_data.embedded", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | SINGLE_THREADED)


def test_start_that_cannot_work_is_refused_with_one_line(tmp_path: Path, checkpoint: Path) -> None:
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    taken = socket.create_server(("127.0.0.1", 0))
    good = ["--model", str(checkpoint), "--dump-folder", str(tmp_path / "dumps")]
    for flags, word in [
        (["--dump-folder", str(tmp_path / "d")], "--model"),
        (["--model", str(tmp_path / "none"), "--dump-folder", str(tmp_path / "d")], "config.json"),
        (["--model", str(checkpoint), "--dump-folder", str(open_folder)], "0700"),
        (["--model", str(checkpoint), "--dump-folder", str(checkpoint / "config.json")], "dump folder"),
        ([*good, "--layers", "2,4"], "end in 8"),
        ([*good, "--layers", "4,2,8"], "ascending"),
        ([*good, "--port", str(taken.getsockname()[1])], "port"),
        ([*good, "--chunked-prefill-size", "0"], "chunked_prefill_size"),
    ]:
        result = run_engine(*flags)
        assert result.returncode == 2, flags
        assert word in result.stderr
        assert len(result.stderr.splitlines()) == 1
    taken.close()


def test_full_dump_folder_is_told_and_the_server_goes_on(start_engine: Start, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("needs a small tmpfs, and mounting is not allowed here")
    try:
        engine = start_engine("--dump-folder", str(small))
        told = [engine.generate([9] * 600, f"dd-{n}")["meta_info"]["drafter_data"]["error"] for n in range(4)]
        assert told[0] == ""
        assert "No space left" in told[-1]
        assert [path.name for path in small.iterdir() if path.name.startswith(TEMPORARY_PREFIX)] == []
        for path in small.iterdir():
            path.unlink()
        assert engine.generate([9] * 600, "dd-again")["meta_info"]["drafter_data"]["error"] == ""
        engine.process.stop()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_command_line_serves_and_prints_where(tmp_path: Path, checkpoint: Path) -> None:
    flags = ["engine", "embedded", "--model", str(checkpoint), "--dump-folder", str(tmp_path / "dumps"), "--port", "0"]
    shown = subprocess.run([sys.executable, "-m", "drafter_data", *flags, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(shown.stdout)["argv"][1:3] == ["-m", "drafter_data.embedded"]
    with subprocess.Popen([sys.executable, "-m", "drafter_data", *flags], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip().removeprefix("ready on ")
        assert url.startswith("http://127.0.0.1:")
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 0
        assert time.monotonic() - started < 5
    assert stat.S_IMODE((tmp_path / "dumps").stat().st_mode) == 0o700
