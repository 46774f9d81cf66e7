"""Does the endpoint really keep connections alive?"""

from __future__ import annotations

import asyncio

from servetune.clock import now
from servetune.drive.connection import Connection, Exchange
from servetune.drive.wire import Wire
from servetune.spec import Target


def keeps_alive(target: Target, payload: bytes, timeout: float) -> bool:
    """Send a request twice on one connection, the second at once after the first.

    Some servers (llama.cpp's HTTP library after a streamed answer) close without having announced
    it. A request sent into that close fails through no fault of the engine, so connections to such
    an endpoint are not used again. False too when the first request fails.
    """
    return asyncio.run(_twice(Wire(target), payload, timeout))


async def _twice(wire: Wire, payload: bytes, timeout: float) -> bool:
    over: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    exchanges = [Exchange(0, now()), Exchange(1, now())]

    def finished(connection: Connection, exchange: Exchange) -> None:
        if over.done():
            return
        if exchange is exchanges[0] and not exchange.failure and connection.usable:
            connection.send(exchanges[1], payload)
        else:
            over.set_result(exchange is exchanges[1] and not exchange.failure)

    try:
        async with asyncio.timeout(timeout):
            connection = await wire.connect(lambda: Connection(finished))
            connection.send(exchanges[0], payload)
            return await over
    except OSError:
        return False
    finally:
        over.cancel()
