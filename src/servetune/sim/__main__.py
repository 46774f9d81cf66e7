"""`python -m servetune.sim`: a scripted server, or a blast server, until interrupted."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import signal
import sys
from pathlib import Path

import msgspec
import uvloop

from servetune.sim.blast import Blast, BlastServer
from servetune.sim.process import KEY_VARIABLE, ServerProcess, blast_process
from servetune.sim.script import Script, uniform
from servetune.sim.server import ScriptedServer


def main() -> int:
    """Exit status: 0 stopped, 1 exited as scripted, 2 wrong arguments or address not free."""
    options = _parser().parse_args()
    try:
        script = None if options.blast else _script(options)
        return uvloop.run(_blast(options) if script is None else _serve(options, script))
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m servetune.sim", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: a free one; the address is printed (default)")
    parser.add_argument("--lifeline", action="store_true", help="end when standard input is closed")
    parser.add_argument("--tokens", type=int, default=100, help="tokens of a stream (default 100)")
    parser.add_argument("--ttft-ms", type=float, default=0.0, help="time to the first token (default 0)")
    parser.add_argument("--gap-ms", type=float, default=0.0, help="time between tokens (default 0)")

    scripted = parser.add_argument_group("scripted server")
    scripted.add_argument("--script", help="JSON file, or '-': one line of standard input")
    scripted.add_argument("--keep-bodies", action="store_true", help="keep request bodies in the log")
    scripted.add_argument("--cert", type=Path, help="TLS certificate file")
    scripted.add_argument("--tls-key", type=Path, help="TLS key file")
    scripted.add_argument("--log-on-exit", action="store_true", help="print the log as JSON at the end")

    blast = parser.add_argument_group("blast server: one pre-rendered event a token, least CPU")
    blast.add_argument("--blast", action="store_true")
    blast.add_argument("--event-bytes", type=int, default=190, help="size of an event (default 190)")
    blast.add_argument("--coalesce", type=int, default=1, help="events in one write (default 1)")
    blast.add_argument("--no-stagger", action="store_true", help="first event exactly at --ttft-ms")
    blast.add_argument("--tick-ms", type=float, default=0.5, help="least time between wake-ups (default 0.5)")
    blast.add_argument("--processes", type=int, default=1, help="processes that share the port (default 1)")
    blast.add_argument("--share-port", action="store_true", help="let other servers listen on the port too")
    return parser


def _script(options: argparse.Namespace) -> Script:
    if options.script is None:
        return Script((uniform(options.tokens, options.ttft_ms, options.gap_ms),))
    data = sys.stdin.buffer.readline() if options.script == "-" else Path(options.script).read_bytes()
    return msgspec.json.decode(data, type=Script)


async def _serve(options: argparse.Namespace, script: Script) -> int:
    stop = asyncio.Event()
    _on_end(options, stop)
    tls = (options.cert, options.tls_key or options.cert) if options.cert else None
    server = ScriptedServer(
        script,
        options.port,
        options.host,
        keep_bodies=options.keep_bodies,
        expected_key=os.environ.get(KEY_VARIABLE),
        tls=tls,
    )
    _rare_collections()
    async with server:
        print(server.url, flush=True)
        waits = [asyncio.ensure_future(event.wait()) for event in (stop, server.exited)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    log = server.log()
    if server.exited.is_set():
        print(f"scripted server: exit: {log.exit_reason}", file=sys.stderr, flush=True)
    if options.log_on_exit:
        sys.stdout.buffer.write(msgspec.json.encode(log) + b"\n")
        sys.stdout.buffer.flush()
    return 1 if server.exited.is_set() else 0


async def _blast(options: argparse.Namespace) -> int:
    stop = asyncio.Event()
    _on_end(options, stop)
    blast = Blast(
        options.tokens,
        options.gap_ms,
        options.event_bytes,
        options.coalesce,
        options.ttft_ms,
        not options.no_stagger,
        options.tick_ms,
    )
    _rare_collections()
    share = options.share_port or options.processes > 1
    async with BlastServer(blast, options.port, options.host, reuse_port=share) as server:
        with contextlib.ExitStack() as others:
            for _ in range(options.processes - 1):
                others.enter_context(_another(options, server.port))
            print(server.url, flush=True)
            await stop.wait()
    return 0


def _another(options: argparse.Namespace, port: int) -> contextlib.AbstractContextManager[ServerProcess]:
    """One more blast server on the same port."""
    return blast_process(
        options.tokens,
        options.gap_ms,
        event_bytes=options.event_bytes,
        coalesce=options.coalesce,
        ttft_ms=options.ttft_ms,
        stagger=not options.no_stagger,
        tick_ms=options.tick_ms,
        host=options.host,
        port=port,
        share_port=True,
    )


def _rare_collections() -> None:
    # A full garbage collection of a long log takes tens of milliseconds, in which every stream is late.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 1000)


def _on_end(options: argparse.Namespace, stop: asyncio.Event) -> None:
    """Set `stop` on SIGINT or SIGTERM, and with --lifeline when standard input ends."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if options.lifeline:
        descriptor = sys.stdin.fileno()

        def readable() -> None:
            if not os.read(descriptor, 4096):
                loop.remove_reader(descriptor)
                stop.set()

        loop.add_reader(descriptor, readable)


if __name__ == "__main__":
    sys.exit(main())
