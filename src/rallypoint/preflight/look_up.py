"""Look-ups of names with a time limit, which the C library does not have."""

from __future__ import annotations

import queue
import threading
from typing import NamedTuple

from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.base.endpoint import resolve

LOOK_UP = 6.0
"""Seconds that a look-up may take. The C library waits 5 for a DNS server before it asks the next one."""
SLOW = 2.0
"""Seconds from which on a look-up is slow: some DNS server does not answer."""


class LookUp(NamedTuple):
    """The result of a name look-up: numeric addresses, or why there are none, and how many seconds it took."""

    addresses: tuple[str, ...] = ()
    error: str = ""
    took: float = 0.0

    @property
    def unanswered(self) -> bool:
        """Whether there was no answer about the name, not even that it does not exist."""
        return not self.addresses and not self.error


def look_up(host: str, seconds: float = LOOK_UP) -> LookUp:
    """Look a name up.

    Args:
        host: a name, or an address.
        seconds: until when an answer is waited for.
    """
    begun = SYSTEM_CLOCK.monotonic()
    answers = queue.SimpleQueue[LookUp]()

    def ask() -> None:
        try:
            answers.put(LookUp(tuple(resolve(host))))
        except OSError as error:
            answers.put(LookUp(error=error.strerror or str(error)))

    threading.Thread(target=ask, daemon=True, name="preflight").start()
    try:
        found = answers.get(timeout=seconds)
    except queue.Empty:
        found = LookUp()
    return found._replace(took=SYSTEM_CLOCK.monotonic() - begun)
