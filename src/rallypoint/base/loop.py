"""The asyncio loop of this process, on its own thread, for all servers and clients.

`uvloop` runs it if installed, otherwise `asyncio`. The new thread imports them, which takes 40 ms. The caller can start
workers meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from rallypoint.base.errors import RallypointError
from rallypoint.base.kernel import check_for_loop
from rallypoint.base.log import get_logger

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import Future

T = TypeVar("T")

log = get_logger(__name__)


class LoopError(RallypointError, RuntimeError):
    pass


class LoopThread:
    """A running loop. Its owner starts and stops it; others only submit work. Its thread starts on first use.

    If the loop cannot be created, no caller waits for it: queued calls never run (see `withdraw`), and later calls
    raise LoopError. Calls in a forked child raise LoopError too, since fork does not copy threads.
    """

    def __init__(self, name: str = "rallypoint-loop") -> None:
        self._process = os.getpid()
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: str | None = None
        self._lock = threading.Lock()
        self._queued_calls: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._begun = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop itself; waits until it is running. Raises LoopError if it cannot be created."""
        self._check_process()
        self._begin()
        self._ready.wait()
        if self._loop is None:
            raise LoopError(self._failure)
        return self._loop

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the loop's process, and so lacks its thread."""
        return os.getpid() != self._process

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` on the loop's thread as soon as possible; never waits. After `stop`, the function is dropped.
        Raises LoopError if the loop cannot be created.
        """
        self._check_process()
        with self._lock:
            if self._failure is not None:
                raise LoopError(self._failure)
            loop = self._loop
            if loop is None:
                self._queued_calls.append(function)
        if loop is None:
            self._begin()
            return
        if threading.get_ident() == self._thread.ident:  # no need to wake it
            loop.call_soon(function)
            return
        try:
            loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed
            if not loop.is_closed():
                raise

    def withdraw(self, function: Callable[[], None]) -> bool:
        """Take back a function passed to `call`, if no loop exists yet. Returns whether it was still queued."""
        if self.is_forked:
            return True
        with self._lock:
            if self._loop is not None or function not in self._queued_calls:
                return False
            self._queued_calls.remove(function)
            return True

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop. Any other thread may wait for the future. Raises LoopError without a loop."""
        try:
            loop = self.loop
        except LoopError:
            work.close()
            raise
        import asyncio

        return asyncio.run_coroutine_threadsafe(work, loop)

    def stop(self, timeout: float | None = None) -> None:
        """Cancel all tasks, close the loop, and wait at most `timeout` seconds for the thread. Idempotent. Do not call
        on the loop's own thread.
        """
        if not self._begun or self.is_forked:
            return
        self._ready.wait()
        loop = self._loop
        if loop is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(loop.stop)
            except RuntimeError:
                if not loop.is_closed():
                    raise
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _check_process(self) -> None:
        """Raise if forked. Call before taking any lock: a lock taken during the fork stays locked forever."""
        if self.is_forked:
            raise LoopError(
                f"a store or rendezvous object created in process {self._process} cannot be used in its forked child "
                f"{os.getpid()}, because threads do not survive a fork; create a new one after the fork"
            )

    def _begin(self) -> None:
        with self._lock:
            if self._begun:
                return
            self._begun = True
        try:
            self._thread.start()
        except RuntimeError as error:  # no thread can be started
            self._fail(error)

    def _run(self) -> None:
        try:
            check_for_loop()
            loop = _new_event_loop()
        except BaseException as error:
            self._fail(error)
            return
        import asyncio

        asyncio.set_event_loop(loop)
        with self._lock:
            self._loop = loop
            for function in self._queued_calls:
                loop.call_soon(function)
            self._queued_calls.clear()
        self._ready.set()
        try:
            loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            asyncio.set_event_loop(None)
            loop.close()

    def _fail(self, error: BaseException) -> None:
        failure = "the event loop of this process cannot be created"
        if isinstance(error, RallypointError):
            failure += f": {error}"
        else:
            failure += (
                f" ({type(error).__name__}: {error}); check the limits of open files (`ulimit -n`) and processes "
                "(`ulimit -u`), and that uvloop is completely installed"
            )
        log.error("%s", failure)
        with self._lock:
            self._failure = failure
        self._ready.set()


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        import asyncio

        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


_shared: LoopThread | None = None
_shared_lock = threading.Lock()


def shared_loop() -> LoopThread:
    """The shared loop thread of this process, which ends with the process."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = LoopThread()
        return _shared


def _reset_after_fork() -> None:
    global _shared, _shared_lock
    _shared, _shared_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)
