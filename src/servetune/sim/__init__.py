"""The scripted server: a real OpenAI-compatible server whose every write is given by a script.

It is the truth that tests compare the measuring client with, and a load for benchmarks.
"""

from servetune.sim.blast import Blast, BlastServer
from servetune.sim.frames import Ask
from servetune.sim.process import ServerProcess, blast_process, serve_process
from servetune.sim.record import Log, Record
from servetune.sim.script import (
    Chunk,
    Piece,
    Reply,
    Script,
    Stream,
    error_reply,
    json_reply,
    uniform,
)
from servetune.sim.server import ScriptedServer
from servetune.sim.truth import Group, Truth, truth

__all__ = [
    "Ask",
    "Blast",
    "BlastServer",
    "Chunk",
    "Group",
    "Log",
    "Piece",
    "Record",
    "Reply",
    "Script",
    "ScriptedServer",
    "ServerProcess",
    "Stream",
    "Truth",
    "blast_process",
    "error_reply",
    "json_reply",
    "serve_process",
    "truth",
    "uniform",
]
