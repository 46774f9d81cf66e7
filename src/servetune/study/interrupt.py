"""Ctrl-C and SIGTERM as a wish: what is measured is kept, wherever it comes."""

from __future__ import annotations

import signal
import threading
from types import TracebackType
from typing import Any, Self


class Interrupt:
    """While entered, the first Ctrl-C or SIGTERM only sets `asked`; a second one raises KeyboardInterrupt.

    An exception at any line could lose a window that had just ended. Outside the main thread, where
    signals do not arrive, it does nothing.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, *_: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
