"""What each engine accepts and says: request bodies, streamed chunks, counters."""

from servetune.engines.counters import Counters, read_counters
from servetune.engines.endpoint import Dialect, dialects, identify
from servetune.engines.openai import Ask, Chunk, body, decode, decode_lines

__all__ = [
    "Ask",
    "Chunk",
    "Counters",
    "Dialect",
    "body",
    "decode",
    "decode_lines",
    "dialects",
    "identify",
    "read_counters",
]
