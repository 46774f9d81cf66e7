from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from servetune.sim import Blast, Script, blast_process, serve_process, uniform
from servetune.sim.process import fetch


def _post(url: str, body: str = '{"stream":true}') -> tuple[int, bytes]:
    client = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    client.request("POST", "/v1/chat/completions", body)
    reply = client.getresponse()
    data = reply.read()
    client.close()
    return reply.status, data


def _gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return True
    return state == "Z"


def _wait_gone(pid: int) -> None:
    end = time.monotonic() + 20
    while not _gone(pid):
        assert time.monotonic() < end, "the server outlived its parent"
        time.sleep(0.02)


def test_start_log_stop() -> None:
    with serve_process(Script((uniform(3, 1, 1),)), keep_bodies=True) as server:
        assert _post(server.url)[0] == 200
        assert server.log().records[0].body == '{"stream":true}'
        assert server.returncode is None
        pid = server.pid
    assert server.returncode == 0
    assert _gone(pid)
    assert server.log().generation_tokens == 3


def test_the_log_outlives_a_scripted_exit() -> None:
    with serve_process(Script((uniform(1, 0, 0),), die_at_request=2)) as server:
        assert _post(server.url)[0] == 200
        with pytest.raises((OSError, http.client.HTTPException)):
            _post(server.url)
        assert server.wait() == 1
        assert server.log().exit_reason == "request 2 was received"
        assert [record.outcome for record in server.log().records] == ["done", "exit"]


def test_a_long_log_does_not_block_the_end() -> None:
    with serve_process(Script((uniform(20_000, 0, 0),))) as server:
        _post(server.url)
        assert _post(server.url)[0] == 200
    assert server.returncode == 0
    assert len(server.log().records) == 2


def test_a_key_is_no_argument() -> None:
    with serve_process(Script((uniform(1, 0, 0),)), expected_key="sesame") as server:
        assert _post(server.url)[0] == 401
        assert b"sesame" not in Path(f"/proc/{server.pid}/cmdline").read_bytes()


def test_a_hung_stream_does_not_block_the_end() -> None:
    with serve_process(Script((uniform(2, 0, 0, stop_after=1, end="hang"),))) as server:
        client = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=10)
        client.request("POST", "/v1/completions", '{"stream":true}')
        assert client.getresponse().status == 200
    assert server.returncode == 0
    assert server.log().records[0].outcome == "aborted"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_orphan(number: int) -> None:
    code = (
        "import time\n"
        "from servetune.sim import Script, serve_process, uniform\n"
        "with serve_process(Script((uniform(1, 0, 0),))) as server:\n"
        "    print(server.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert not _gone(pid)
    os.kill(parent.pid, number)
    parent.wait()
    parent.stdout.close()
    _wait_gone(pid)


def test_command_line(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_bytes(msgspec.json.encode(Script((uniform(2, 0, 0),), model="mine")))
    command = [sys.executable, "-m", "servetune.sim"]
    assert b"--script" in subprocess.run([*command, "--help"], capture_output=True, check=True).stdout
    server = subprocess.Popen([*command, "--script", path], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert server.stdout is not None
    url = server.stdout.readline().decode().strip()
    assert json.loads(fetch(f"{url}/v1/models"))["data"][0]["id"] == "mine"
    server.send_signal(signal.SIGINT)
    assert server.wait(10) == 0
    server.stdout.close()


def test_wrong_arguments_are_said_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text('{"replies":[{"type":"stream","colour":1}]}')
    command = [sys.executable, "-m", "servetune.sim", "--script", path]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 2
    assert b"colour" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("gap_ms", "coalesce", "processes"), [(0.0, 1, 1), (0.0, 8, 1), (2.0, 1, 1), (2.0, 4, 1), (0.0, 1, 2)]
)
def test_blast_streams_are_valid(gap_ms: float, coalesce: int, processes: int) -> None:
    with blast_process(21, gap_ms, coalesce=coalesce, processes=processes) as server:
        begun = time.monotonic()
        status, body = _post(server.url)
        took = time.monotonic() - begun
        assert fetch(f"{server.url}/health") == b"{}"
    events = body.decode().removesuffix("\n\n").split("\n\n")
    frames = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert status == 200
    assert events[-1] == "data: [DONE]"
    assert len(frames) == 23
    assert all(frame["choices"][0]["delta"]["content"] for frame in frames[:21])
    assert frames[-1]["usage"]["completion_tokens"] == 21
    assert took >= 20 * gap_ms / 1000
    assert server.returncode == 0


def test_blast_keeps_a_slow_reader_whole() -> None:
    with blast_process(50_000) as server:
        client = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20)
        client.request("POST", "/v1/chat/completions", "{}")
        reply = client.getresponse()
        time.sleep(0.3)
        body = reply.read()
        client.close()
    assert body.count(b"data: ") == 50_003


def test_blast_event_size() -> None:
    assert len(Blast(event_bytes=190).event()) == 190
    assert len(Blast(event_bytes=400).event()) == 400
