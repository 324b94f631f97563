"""This process's signals while it has workers: each raises `SignalException` in the main thread.

Laws:
- the previous handlers are restored by the last `restore_handlers`; what others have installed meanwhile stays;
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

from rallypoint.agent.signals import DEFAULT_SIGNALS, FORWARDED_SIGNALS, SIGNALS_VARIABLE, handled_signals
from rallypoint.base.errors import SignalException
from rallypoint.base.log import get_logger
from rallypoint.base.signals import SignalWakeup, is_posting_handler, signal_name

__all__ = ["install_handlers", "restore_handlers", "signal_wakeup"]

log = get_logger(__name__)

_previous: dict[int, Any] = {}
_users = 0


def install_handlers() -> bool:
    """Handle the signals that `TORCHELASTIC_SIGNALS_TO_HANDLE` names, until `restore_handlers`.

    Returns:
        Whether they are handled: only the main thread can do that.
    """
    global _users
    if threading.current_thread() is not threading.main_thread():
        log.warning("signals to this process leave its workers to their reaper: only the main thread handles signals")
        return False
    _users += 1
    named = os.environ.get(SIGNALS_VARIABLE, DEFAULT_SIGNALS) != DEFAULT_SIGNALS
    for number in handled_signals():
        if not named and number in FORWARDED_SIGNALS:  # an agent's own idea of what a scheduler sends
            continue
        if number not in _previous and not is_posting_handler(signal.getsignal(number)):
            try:
                _previous[number] = signal.signal(number, _raise)
            except OSError as error:
                log.warning("%s cannot be handled: %s", signal_name(number), error)
    return True


def restore_handlers() -> None:
    """Undo one `install_handlers`. Outside the main thread the handlers stay until the next who can undoes them."""
    global _users
    _users -= 1
    if _users > 0 or threading.current_thread() is not threading.main_thread():
        return
    for number, old in _previous.items():
        if signal.getsignal(number) is _raise:
            signal.signal(number, old if old is not None else signal.SIG_DFL)
    _previous.clear()


@contextmanager
def signal_wakeup() -> Iterator[list[int]]:
    """Descriptors that wake the main thread when another gets a signal; none if no signals are handled."""
    if not _users or threading.current_thread() is not threading.main_thread():
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


def _reset_after_fork() -> None:
    """Those who installed them are in the original, not in a copy of the process."""
    global _users
    _users = 0
    _previous.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
