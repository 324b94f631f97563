"""This process's signals while it has workers: each raises `SignalException` in the main thread.

Laws:
- the former handlers are back when the last who took the signals gives them back; what somebody else has put in
  their place meanwhile stays;
- what an agent of ours handles at this moment is left to it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rallypoint.agent.signal_set import DEFAULT_SIGNALS, FORWARDED_SIGNALS, SIGNALS_VARIABLE, handled_signals
from rallypoint.base.errors import SignalException
from rallypoint.base.log import get_logger
from rallypoint.base.signals import SignalWakeup, is_posting_handler, signal_name

__all__ = ["bell", "give_back", "take"]

log = get_logger(__name__)

_former: dict[int, Any] = {}
_takers = 0


def take() -> bool:
    """Take the signals that `TORCHELASTIC_SIGNALS_TO_HANDLE` names; each `take` that did is followed by a `give_back`.

    Returns:
        Whether they were taken: only the main thread can.
    """
    global _takers
    if threading.current_thread() is not threading.main_thread():
        log.warning("signals that end this process will leave its workers to their reaper: a thread cannot take them")
        return False
    _takers += 1
    named = os.environ.get(SIGNALS_VARIABLE, DEFAULT_SIGNALS) != DEFAULT_SIGNALS
    for number in handled_signals():
        if not named and number in FORWARDED_SIGNALS:  # an agent's own idea of what a scheduler sends
            continue
        if number not in _former and not is_posting_handler(signal.getsignal(number)):
            try:
                _former[number] = signal.signal(number, _raise)
            except OSError as error:
                log.warning("%s cannot be handled: %s", signal_name(number), error)
    return True


def give_back() -> None:
    """Undo one `take`. In another thread than the main one the handlers stay until the next who can undoes them."""
    global _takers
    _takers -= 1
    if _takers > 0 or threading.current_thread() is not threading.main_thread():
        return
    for number, old in _former.items():
        if signal.getsignal(number) is _raise:
            signal.signal(number, old if old is not None else signal.SIG_DFL)
    _former.clear()


@contextmanager
def bell() -> Iterator[list[int]]:
    """Descriptors that wake who sleeps in the main thread when a signal comes to any other; none if none were taken."""
    if not _takers or threading.current_thread() is not threading.main_thread():
        yield []
        return
    made = SignalWakeup()
    try:
        yield [made.fileno()]
    finally:
        made.close()


def _raise(number: int, _frame: FrameType | None) -> None:
    asked = signal.Signals(number)
    raise SignalException(f"Process {os.getpid()} got signal: {asked}", asked)


def _begin_anew() -> None:
    """Those who took them are in the original, not in a copy of the process."""
    global _takers
    _takers = 0
    _former.clear()


os.register_at_fork(after_in_child=_begin_anew)
