"""Runs one stage on one event loop: pacing decides when, connections carry, a sink records."""

from __future__ import annotations

import asyncio
import errno
import gc
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from servetune.clock import MS, SECOND, Alarm, now
from servetune.drive.connection import Connection, Exchange
from servetune.drive.pacing import ClosedLoop, OpenLoop, Pacing, Take
from servetune.drive.plan import Stage
from servetune.drive.watch import Watch, WatchReport
from servetune.drive.wire import Wire
from servetune.events import Failure

SCRAPE = -1
"""`Exchange.index` of a reading of the server's counters."""

_IDLE_LIMIT = 2 * SECOND
"""A pooled connection idle for longer is not used: servers close idle ones after about 5 s, and a
request that meets such a close would fail for a reason of the client's."""

_DEAD_AFTER = 3
"""Connections refused in a row after which the endpoint counts as dead (P-68)."""

_SWEEP = 200 * MS
_TOTAL = re.compile(rb'"completion_tokens":\s*(\d+)')
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS)


class StageReport(msgspec.Struct):
    """How a stage went, from one worker's view.

    started, ended   ns
    stopped          why it ended early: "", "interrupted" or "died under load"
    opened           connections opened during the stage
    """

    started: int
    ended: int
    stopped: str
    opened: int
    watch: WatchReport


@dataclass
class Progress:
    """What the live line shows, renewed while the stage runs.

    reads         socket reads of all answers so far
    ended_reads   of them those of ended answers, which held `ended_tokens` by the server's word
    """

    sent: int = 0
    done: int = 0
    failed: int = 0
    reads: int = 0
    in_flight: int = 0
    ended_reads: int = 0
    ended_tokens: int = 0


@dataclass
class Driver:
    """Sends the requests of a stage and hands each ended exchange to `record`.

    take     gives the next request number of a closed loop (shared between workers)
    tick     called about five times a second with the progress
    """

    wire: Wire
    record: Callable[[Exchange], None]
    take: Take
    worker: int = 0
    workers: int = 1
    tick: Callable[[Progress], None] = lambda _: None
    _idle: list[Connection] = field(default_factory=list)

    async def open_pool(self, connections: int) -> None:
        """Open connections before the window. One that can't be opened now fails later, visibly."""
        gc.collect()
        if not self.wire.target.reuse:
            return
        missing = connections - len(self._idle)
        opened = await asyncio.gather(
            *(self.wire.connect(lambda: Connection(self._finished)) for _ in range(missing)),
            return_exceptions=True,
        )
        for connection in opened:
            if isinstance(connection, Connection):
                self._release(connection)

    async def run(self, stage: Stage, at: int) -> StageReport:
        """Run the stage from the time `at` (ns) until its last request has ended."""
        loop = asyncio.get_running_loop()
        self._stage, self._progress, self._opened = stage, Progress(), 0
        self._stopped, self._refused, self._unwritten = "", 0, 0
        self._in_flight: dict[Exchange, Connection | None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._over: asyncio.Future[None] = loop.create_future()
        self._alarm = Alarm(loop)
        self._pacing: Pacing
        if stage.due is not None:
            self._pacing = OpenLoop(stage, self._alarm, self._send, self.worker, self.workers)
        else:
            between = self._read_counters if stage.scrape else None
            self._pacing = ClosedLoop(stage, self._alarm, self._send, self.take, between)
        watch = Watch(loop)
        watch.start(at)
        self._pacing.start(at)
        self._alarm.at(at, self._check_over)  # all may be taken or stopped before the first one leaves
        self._alarm.at(at + _SWEEP, self._sweep)
        gc.disable()  # a collection over the stored reads would stall the stamps
        try:
            if not self._pacing.exhausted:
                await self._over
            ended = now()
            for index, due in self._pacing.unsent() if self._stopped == "died under load" else ():
                exchange = Exchange(index, due)
                exchange.failure = f"{Failure.UNSENT}: the endpoint had died"
                self.record(exchange)
            self.tick(self._progress)
            return StageReport(at, ended, self._stopped, self._opened, watch.stop())
        finally:
            gc.enable()
            self._alarm.close()

    def stop(self, why: str) -> None:
        """Send no more; when the user interrupts, end the requests in flight too."""
        self._stopped = self._stopped or why
        self._pacing.stop()
        if why == "interrupted":
            for exchange in list(self._in_flight):
                self._abandon(exchange, Failure.INTERRUPTED, "by the user")
        self._check_over()

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _send(self, index: int, scheduled: int) -> None:
        exchange = Exchange(index, scheduled)
        self._progress.sent += 1
        payloads = self._stage.payloads
        self._carry(exchange, payloads[index % len(payloads)])

    def _carry(self, exchange: Exchange, payload: bytes) -> None:
        connection = self._ready_connection()
        self._in_flight[exchange] = connection
        if connection is not None:
            connection.send(exchange, payload)
        else:
            task = asyncio.get_running_loop().create_task(self._open_and_send(exchange, payload))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _ready_connection(self) -> Connection | None:
        oldest = now() - _IDLE_LIMIT
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.idle_since >= oldest:
                return connection
            connection.close()
        return None

    async def _open_and_send(self, exchange: Exchange, payload: bytes) -> None:
        begun = now()
        self._opened += 1
        try:
            async with asyncio.timeout(self._stage.limits.timeout):
                connection = await self.wire.connect(lambda: Connection(self._finished))
        except TimeoutError:
            self._failed_to_connect(exchange, Failure.TIMEOUT, "no connection in time")
        except ConnectionRefusedError as error:
            self._failed_to_connect(exchange, Failure.REFUSED, error.strerror or str(error))
        except OSError as error:
            client = error.errno in _OUT_OF_FILES
            failure = Failure.CLIENT if client else Failure.UNREACHABLE
            self._failed_to_connect(exchange, failure, error.strerror or str(error) or type(error).__name__)
        else:
            exchange.connect = now() - begun
            if exchange not in self._in_flight:  # given up meanwhile
                self._release(connection)
                return
            self._in_flight[exchange] = connection
            connection.send(exchange, payload)

    def _failed_to_connect(self, exchange: Exchange, failure: Failure, words: str) -> None:
        exchange.ended = now()
        exchange.failure = f"{failure}: {words}"
        self._settle(exchange)

    def _finished(self, connection: Connection, exchange: Exchange) -> None:
        self._release(connection)
        self._settle(exchange)

    def _release(self, connection: Connection) -> None:
        if connection.usable and not self.wire.target.reuse:
            connection.close()
        elif connection.usable:
            connection.idle_since = now()
            self._idle.append(connection)

    def _settle(self, exchange: Exchange) -> None:
        """Account for an ended exchange; the next request leaves before it is written down."""
        if self._in_flight.pop(exchange, self) is self:
            return
        self._unwritten += 1
        if exchange.index != SCRAPE:
            self._count(exchange)
            dead = exchange.failure.startswith((Failure.REFUSED, Failure.UNREACHABLE))
            self._refused = self._refused + 1 if dead else 0
            if self._refused >= _DEAD_AFTER:
                self.stop("died under load")
            self._pacing.finished()
        else:
            self._after_counters()
        asyncio.get_running_loop().call_soon(self._write_down, exchange)

    def _count(self, exchange: Exchange) -> None:
        progress = self._progress
        progress.done += 1
        progress.failed += bool(exchange.failure)
        progress.ended_reads += len(exchange.reads)
        for read in exchange.reads[:-4:-1]:
            if totals := _TOTAL.findall(read):
                progress.ended_tokens += int(totals[-1])
                break

    def _write_down(self, exchange: Exchange) -> None:
        self.record(exchange)
        self._unwritten -= 1
        self._check_over()

    def _check_over(self) -> None:
        busy = self._in_flight or self._unwritten
        if self._pacing.exhausted and not busy and not self._over.done():
            self._over.set_result(None)

    def _read_counters(self, go_on: Callable[[], None]) -> None:
        if self._stopped:
            go_on()
            return
        assert self._stage.scrape is not None
        self._after_counters = go_on
        self._carry(Exchange(SCRAPE, now()), self._stage.scrape)

    def _abandon(self, exchange: Exchange, failure: Failure, words: str) -> None:
        connection = self._in_flight.get(exchange)
        if connection is not None:
            connection.fail(failure, words)
        else:
            self._failed_to_connect(exchange, failure, words)

    def _sweep(self) -> None:
        """Deadlines and progress, five times a second: no timer a request, nothing an event."""
        moment = now()
        limits = self._stage.limits
        reads = self._progress.ended_reads
        for exchange in list(self._in_flight):
            if exchange.sent < 0:
                continue
            reads += len(exchange.reads)
            heard = exchange.stamps[-1] if exchange.stamps else exchange.sent
            if moment - exchange.sent > limits.timeout * SECOND:
                self._abandon(exchange, Failure.TIMEOUT, f"no end after {limits.timeout:g} s")
            elif moment - heard > limits.stall * SECOND:
                self._abandon(exchange, Failure.STALLED, f"no byte for {limits.stall:g} s")
        self._progress.reads = reads
        self._progress.in_flight = len(self._in_flight)
        self.tick(self._progress)
        self._alarm.at(moment + _SWEEP, self._sweep)
