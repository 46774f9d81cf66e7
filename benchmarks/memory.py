"""Peak memory of the client for a million events.

    python benchmarks/memory.py [--requests 2000] [--tokens 500] [--concurrency 2000] [--json]

Peak of the resident memory of the client's processes together (worker and parent), sampled every
20 ms from the start until the measurement is there. By default all requests are in flight at once, the
worst case.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import threading
from pathlib import Path

from servetune.drive import Sent, Session, Stage, request_bytes
from servetune.events import Phase
from servetune.measure import Client, Server, measure
from servetune.sim import blast_process
from servetune.spec import Load, Target
from servetune.study.preflight import open_files

BODY = b'{"model":"blast","stream":true,"messages":[{"role":"user","content":"Say a few words."}]}'


class Sampler(threading.Thread):
    """Samples the resident memory (bytes) of this process and its children but the server."""

    def __init__(self, server: int) -> None:
        super().__init__(daemon=True)
        self._server = server
        self.peak: dict[str, int] = {"total": 0}
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.02):
            parent = _resident(os.getpid())
            children = [child.pid for child in multiprocessing.active_children()]
            workers = sum(_resident(pid) for pid in children if pid and pid != self._server)
            if parent + workers > self.peak["total"]:
                self.peak = {"total": parent + workers, "parent": parent, "workers": workers}


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=2000)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    load = Load(slots=arguments.concurrency)
    open_files([load])
    with blast_process(tokens=arguments.tokens, gap_ms=40.0) as server:
        sampler = Sampler(server.pid)
        sampler.start()
        target = Target.parse(server.url)
        payload = request_bytes(target, "POST", "/v1/chat/completions", BODY)
        stage = Stage(Phase.MEASURED, [payload], slots=load.slots, requests=arguments.requests)
        with Session(target, [stage], [[Sent()]]) as session:
            events = session.run(0).events
        measurement = measure(events, load, Client(), Server())
        sampler.over.set()
        sampler.join()
    figures = {
        "requests": len(events),
        "failed": measurement.requests.failed,
        "events": int((events.chunk_tokens > 0).sum()),
        **{f"peak_{name}_mb": value / 1e6 for name, value in sampler.peak.items()},
    }
    for name, value in figures.items():
        print(f"{name:18}{value:12,.0f}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
