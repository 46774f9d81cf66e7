"""Sends requests at the right time and stamps every arrival; what a metric is, it does not know."""

from servetune.drive.collect import Sent
from servetune.drive.driver import Progress, StageReport
from servetune.drive.plan import Limits, Stage
from servetune.drive.probe import keeps_alive
from servetune.drive.session import Driven, Session, WorkerError
from servetune.drive.watch import WatchReport
from servetune.drive.wire import Answer, UnreachableError, Wire, fetch, request_bytes

__all__ = [
    "Answer",
    "Driven",
    "Limits",
    "Progress",
    "Sent",
    "Session",
    "Stage",
    "StageReport",
    "UnreachableError",
    "WatchReport",
    "Wire",
    "WorkerError",
    "fetch",
    "keeps_alive",
    "request_bytes",
]
