"""Interrupts the function in the main thread from another thread, so that blocking system calls return too.

Laws:

1. `RoundEnded` is raised in the main thread only, only while the function runs, and only if its round has ended.
2. Nothing is raised within `uninterrupted` (or `notices.saving`), but at the end of the block.
3. Nothing is raised while the function handles an exception, be it `RoundEnded` or another: `except`, and `finally` and
   `with` on the way out. Such a clean-up is not interrupted. Exceptions that the caller of the function handles do not
   count. `send` has to be repeated until the function ends: nothing else notices that the handling is over.
4. Nothing is raised in `__del__` and in finalizers: whatever they raise is only printed, and their clean-up would be
   cut. One that runs while an error leaves a loop, as that of torch's data loader, does not even see the error.
5. Nothing is raised while a module is imported, which would leave half of it: many cannot be imported twice.
6. A forked process is never interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType

from rallypoint import notices

_IMPORT_SYSTEM = "<frozen importlib._bootstrap>"
_FINALIZERS = (("weakref", "finalize"), ("multiprocessing.util", "Finalize"))
"""Classes of what is called when an object is gone."""
_used = 0
"""The signal that earlier functions used; few signals are free."""
_CALLER = os.path.join(os.path.dirname(__file__), "rounds.py"), "_call"
"""File and name of what calls the function."""


class RoundEnded(BaseException):
    """The round has ended: let this pass. It is not an `Exception`, so that error handlers do not catch it."""


class Interruption:
    """The only owner of the signal and its handler."""

    def __init__(self, due: Callable[[], bool]) -> None:
        """Set the handler of a free signal for good; `due`, asked in it, says whether the function's round has ended.

        Raises:
            OSError, ValueError: this is not the main thread, or no signal is free.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("it was not called on the main thread")
        self._due = due
        self._pid = os.getpid()
        self._main = threading.main_thread().ident
        self.inside = False
        """Whether the function is running."""
        self.raised = False
        """Whether it was interrupted."""
        self._handled_by_caller = id(None)
        global _used
        self._signal = _used = _free_signal()
        # It stays for good: a signal may be on its way when the function returns.
        signal.signal(self._signal, lambda _number, _frame: self.check())
        notices.interrupt = self.check

    def enter(self) -> None:
        """Note that the function begins, and raise `RoundEnded` if its round has ended already."""
        self.raised = False
        # Not the exception itself: that would keep what its traceback holds. The caller's frame keeps it long enough.
        self._handled_by_caller = id(sys.exc_info()[1])
        self.inside = True
        self.check()

    def check(self) -> None:
        """Raise `RoundEnded` if it is due and the main thread may be interrupted at this point."""
        if not self.inside or os.getpid() != self._pid or not self._due():
            return
        if notices.open_blocks or threading.get_ident() != self._main or self._handles_an_exception():
            return
        if _importing_or_finalizing():
            return
        self.raised = True
        raise RoundEnded

    def send(self) -> None:
        """Make the main thread call `check`, from another thread."""
        if self._main is not None:
            signal.pthread_kill(self._main, self._signal)

    def _handles_an_exception(self) -> bool:
        error = sys.exc_info()[1]
        return error is not None and id(error) != self._handled_by_caller


def _importing_or_finalizing() -> bool:
    """Whether the function is within an import or a finalizer. It may itself be called by one: frames above it do not
    count.
    """
    frame: FrameType | None = sys._getframe()
    finalizers = _finalizers()
    while frame is not None and ((code := frame.f_code).co_filename, code.co_name) != _CALLER:
        if code.co_filename == _IMPORT_SYSTEM or code.co_name == "__del__" or code in finalizers:
            return True
        frame = frame.f_back
    return False


def _finalizers() -> list[CodeType]:
    found = (getattr(sys.modules.get(module), name, None) for module, name in _FINALIZERS)
    return [each.__call__.__code__ for each in found if each is not None]


def _free_signal() -> int:
    if _used and getattr(signal.getsignal(_used), "__module__", "") == __name__:
        return _used
    names = vars(signal)
    for number in range(names.get("SIGRTMAX", 0) - 1, names.get("SIGRTMIN", 0), -1):
        if signal.getsignal(number) == signal.SIG_DFL:
            return number
    raise OSError("each real-time signal has a handler, or this system has none")
