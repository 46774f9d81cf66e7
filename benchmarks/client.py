"""What a streamed event costs the client: CPU µs an event, beside other clients, in one run.

    python benchmarks/client.py [--json] [--repeats 4] [--peers]

Every client runs in a process of its own, on one core, against the same server on another core: one
event of about 190 bytes a write, each stream at its own exact times. The clients take turns in an order
that is turned over at each repeat; the least of the repeats counts, since whatever disturbs a run only
adds CPU. CPU is that of the client's process from the first request until every answer is read into
counts, imports and connections left out; `servetune_receive` is the part spent while answers arrive, the
rest comes after the window. The floor only stamps and stores what it reads. `--json` prints one object
as the last line.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from servetune.sim import blast_process

SHAPES = {"64 x 50/s": (64, 20.0, 150), "512 x 25/s": (512, 40.0, 200)}
"""Streams, gap in ms, events a stream."""
CLIENTS = ("floor", "servetune", "servetune_receive", "aiohttp", "aiohttp_json", "httpx")
BLAST_STREAMS, BLAST_TOKENS = 64, 4000
RATE, RATE_SECONDS = 1000, 10
BODY = {"model": "blast", "stream": True, "messages": [{"role": "user", "content": "Say a few words."}]}
CORES = sorted(os.sched_getaffinity(0))
PATH = "/v1/chat/completions"

Figures = dict[str, Any]


# --- the clients; each returns CPU seconds and the number of events it saw ---------------------------


async def floor(url: str, streams: int, seconds: float) -> Figures:
    """A protocol whose receive path stamps and stores, a stream by itself, and nothing else: it does
    not know when an answer is complete."""
    from servetune.clock import now

    class Stamping(asyncio.Protocol):
        def __init__(self) -> None:
            self.stamps = array("q")
            self.reads: list[bytes] = []

        def data_received(self, data: bytes) -> None:
            self.stamps.append(now())
            self.reads.append(data)

    host, port = _host(url)
    loop = asyncio.get_running_loop()
    opened = [await loop.create_connection(Stamping, host, port) for _ in range(streams)]
    payload = _payload(host, port)
    gc.disable()
    begun = time.process_time()
    for transport, _ in opened:
        transport.write(payload)
    await asyncio.sleep(seconds * 0.5)
    for _ in range(600):
        before = sum(len(protocol.reads) for _, protocol in opened)
        await asyncio.sleep(0.5)
        if before == sum(len(protocol.reads) for _, protocol in opened):
            break
    cpu = time.process_time() - begun
    return {"cpu": cpu, "events": sum(b"".join(p.reads).count(b"\ndata: {") for _, p in opened)}


async def servetune(url: str, streams: int, seconds: float) -> Figures:
    """The driver, its spool, and the reading of every answer into event columns."""
    import numpy as np

    from servetune.drive.collect import Sent, collect
    from servetune.drive.driver import Driver
    from servetune.drive.plan import Stage
    from servetune.drive.spool import Spool
    from servetune.drive.wire import Wire, request_bytes
    from servetune.events import Phase
    from servetune.spec import Target

    target = Target.parse(url)
    payload = request_bytes(target, "POST", PATH, json.dumps(BODY).encode())
    numbers = iter(range(10 * streams))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "raw"
        spool = Spool(path)
        driver = Driver(Wire(target), spool.add, lambda: next(numbers))
        stage = Stage(Phase.MEASURED, [payload], slots=streams, requests=streams)
        await driver.open_pool(streams)
        begun = time.process_time()
        await driver.run(stage, time.monotonic_ns())
        received = time.process_time()
        spool.close()
        events = collect(path, [Sent()], phase=Phase.MEASURED, target=target)
        cpu = time.process_time() - begun
    assert events.ok.all(), events.error
    count = int(np.sum(events.chunk_tokens > 0))
    return {"cpu": cpu, "receive_cpu": received - begun, "events": count}


async def aiohttp_client(url: str, streams: int, loads: Callable[[bytes], Any]) -> Figures:
    import aiohttp

    seen = 0

    async def one(session: aiohttp.ClientSession) -> None:
        nonlocal seen
        async with session.post(url + PATH, json=BODY) as answer:
            async for line in answer.content:
                stamp = time.perf_counter_ns()  # noqa: F841
                if line.startswith(b"data: {"):
                    chunk = loads(line[6:])
                    seen += bool(chunk["choices"] and chunk["choices"][0]["delta"].get("content"))

    limits = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=limits, timeout=aiohttp.ClientTimeout(total=None)) as session:
        begun = time.process_time()
        await asyncio.gather(*(one(session) for _ in range(streams)))
        return {"cpu": time.process_time() - begun, "events": seen}


async def httpx_client(url: str, streams: int) -> Figures:
    import httpx

    seen = 0

    async def one(client: httpx.AsyncClient) -> None:
        nonlocal seen
        async with client.stream("POST", url + PATH, json=BODY) as answer:
            async for line in answer.aiter_lines():
                stamp = time.perf_counter_ns()  # noqa: F841
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    seen += bool(chunk["choices"] and chunk["choices"][0]["delta"].get("content"))

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as client:
        begun = time.process_time()
        await asyncio.gather(*(one(client) for _ in range(streams)))
        return {"cpu": time.process_time() - begun, "events": seen}


def client(name: str, url: str, streams: int, seconds: float) -> Figures:
    """Run one client in this process on its own core."""
    import uvloop

    os.sched_setaffinity(0, {CORES[0]})
    work: Awaitable[Figures]
    if name == "floor":
        work = floor(url, streams, seconds)
    elif name == "servetune":
        work = servetune(url, streams, seconds)
    elif name == "aiohttp":
        import orjson

        work = aiohttp_client(url, streams, orjson.loads)
    elif name == "aiohttp_json":
        return asyncio.run(aiohttp_client(url, streams, json.loads))
    else:
        work = httpx_client(url, streams)
    begun = time.monotonic()
    figures: Figures = uvloop.run(work)  # type: ignore[arg-type]
    return {**figures, "wall": time.monotonic() - begun}


def _host(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


def _payload(host: str, port: int) -> bytes:
    body = json.dumps(BODY).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


# --- the runs ----------------------------------------------------------------------------------------


def run_client(name: str, url: str, streams: int, seconds: float) -> Figures:
    command = [sys.executable, __file__, "--client", name, url, str(streams), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def paced(repeats: int) -> dict[str, dict[str, float]]:
    """CPU µs an event: shape -> client -> least of the repeats."""
    found: dict[str, dict[str, list[float]]] = {shape: {} for shape in SHAPES}
    names = [name for name in CLIENTS if name != "servetune_receive"]
    for repeat in range(repeats):
        for shape, (streams, gap, tokens) in SHAPES.items():
            for name in names if repeat % 2 == 0 else reversed(names):
                with blast_process(tokens=tokens, gap_ms=gap) as server:
                    os.sched_setaffinity(server.pid, {CORES[-1]})
                    figures = run_client(name, server.url, streams, tokens * gap / 1000)
                expected = streams * tokens
                if name != "floor" and figures["events"] != expected:
                    raise RuntimeError(f"{name} saw {figures['events']} of {expected} events")
                note(f"{shape}  {name:14} {figures['cpu'] / expected * 1e6:6.2f} µs an event")
                found[shape].setdefault(name, []).append(figures["cpu"] / expected * 1e6)
                if name == "servetune":
                    received = figures["receive_cpu"] / expected * 1e6
                    found[shape].setdefault("servetune_receive", []).append(received)
    return {
        shape: {name: min(values) for name, values in clients.items()} for shape, clients in found.items()
    }


def blast(repeats: int) -> dict[str, float]:
    """Most events a second on one core: a server that writes as fast as the sockets take it."""
    rates: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name in ("floor", "servetune", "aiohttp"):
            with blast_process(tokens=BLAST_TOKENS, gap_ms=0.0) as server:
                os.sched_setaffinity(server.pid, {CORES[-1]})
                figures = run_client(name, server.url, BLAST_STREAMS, 1.0)
            rate = BLAST_STREAMS * BLAST_TOKENS / figures["cpu"]
            note(f"blast       {name:14} {rate:,.0f} events a second of CPU")
            rates.setdefault(name, []).append(rate)
    return {name: max(values) for name, values in rates.items()}


def lateness() -> float:
    """p99 of t_sent - t_scheduled in ms, open loop at RATE requests a second."""
    import numpy as np

    from servetune.drive import Sent, Session, Stage, request_bytes
    from servetune.events import Phase
    from servetune.spec import Load, Target
    from servetune.traffic import offsets

    due = offsets(Load.parse(f"rate={RATE}"), requests=None, seconds=RATE_SECONDS, seed=1)
    with blast_process(tokens=2, gap_ms=10.0) as server:
        os.sched_setaffinity(server.pid, {CORES[-1]})
        target = Target.parse(server.url)
        payload = request_bytes(target, "POST", PATH, json.dumps(BODY).encode())
        with Session(target, [Stage(Phase.MEASURED, [payload], due=due)], [[Sent()]]) as session:
            events = session.run(0).events
    assert events.ok.all(), set(events.error)
    late = (events.sent - events.scheduled) / 1e6
    return float(np.quantile(late, 0.99))


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(repeats: int, *, peers: bool) -> Figures:
    cost = paced(repeats)
    rates = blast(repeats)
    late = lateness()
    note(f"lateness p99 at {RATE} requests a second: {late:.3f} ms")
    busiest = cost["512 x 25/s"]
    result: Figures = {
        "us_per_event": dict(busiest),
        "us_per_event_by_shape": cost,
        "events_per_s_core": {name: 1e6 / value for name, value in busiest.items()},
        "blast_events_per_s_core": rates,
        "lateness_p99_ms": late,
        "ratio_to_floor": {s: c["servetune"] / c["floor"] for s, c in cost.items()},
        "receive_ratio_to_floor": {s: c["servetune_receive"] / c["floor"] for s, c in cost.items()},
        "aiohttp_over_servetune": {s: c["aiohttp"] / c["servetune"] for s, c in cost.items()},
    }
    if peers:
        _add_peers(result)
    return result


def _add_peers(result: Figures) -> None:
    from peers import available, us_per_event  # type: ignore[import-not-found]

    streams, gap, tokens = SHAPES["64 x 50/s"]
    result["peers_shape"] = "64 x 50/s"
    for name in available():
        with blast_process(tokens=tokens, gap_ms=gap) as server:
            os.sched_setaffinity(server.pid, {CORES[-1]})
            found = us_per_event(name, server.url, streams=streams, tokens=tokens, cpus={CORES[0]})
        note(f"64 x 50/s   {name:14} {found.us_per_event} µs an event {found.note}")
        result["us_per_event"][name] = found.us_per_event
        if found.us_per_event:
            result["events_per_s_core"][name] = 1e6 / found.us_per_event


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--peers", action="store_true", help="also whole guidellm, aiperf, vllm bench serve")
    parser.add_argument("--client", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        name, url, streams, seconds = arguments.client
        print(json.dumps(client(name, url, int(streams), float(seconds))))
        return
    result = measure(arguments.repeats, peers=arguments.peers)
    for shape, clients in result["us_per_event_by_shape"].items():
        for name, value in clients.items():
            note(f"{shape:12}{name:18}{value:7.2f} µs an event")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
