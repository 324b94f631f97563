"""`resumable`: moves a process that keeps its memory from round to round. Puts the agent's orders and the function's
ends into one sequence.

Laws:

1. The function is called once per round that the agent announces to this process, one call after another. The first
   round is the one in which the process was started.
2. An exception after the function's round has ended counts as leaving the round, except SystemExit and
   KeyboardInterrupt, which end the process. A return counts as leaving if the function was interrupted. Any other
   return is final.
3. An exception before that may result from another worker's death that the agent has not announced yet. So it is
   delayed for `ECHO_SECONDS`, and then raised.
4. `left` is written when all process groups of the old round are gone. A failure before that ends the process, and the
   agent starts another.
5. A forked process takes no part in this.
6. `prepare` runs once, before the first call, and is never interrupted. While it runs, the process is in no round: it
   answers `leave` immediately. Afterwards it enters the current round.
7. A standby worker is such a process without a local rank. When the agent assigns one, it enters a round like any other
   worker. If it cannot announce itself, it ends: it must never call the function on its own.

The channel between an agent and a worker consists of files in the notice directory. Laws:

1. `inprocess.<LOCAL_RANK>` is a FIFO. If it has a reader, this process can continue; it is created only then. When the
   function has ended for good, the FIFO stays, without a reader. So the agent knows that a process that replaces a
   failed or succeeded worker can continue, too.
2. The agent writes lines to it: `leave <ROUND>`: this round has ended; `enter <ROUND>`: a new one has started, and its
   variables are in `round.<LOCAL_RANK>.json`; `rank <LOCAL_RANK>`: this is the process's local rank from now on.
   A standby worker starts with the number in `RALLYPOINT_STANDBY`, above all local ranks; the agent renames the FIFO.
3. The worker answers `leave` with an empty file `left.<LOCAL_RANK>.<ROUND>`, and creates `prepared.<LOCAL_RANK>` after
   `prepare` returns.
4. One process speaks for a local rank: a FIFO that another process reads is left untouched.
"""

from __future__ import annotations

import json
import math
import os
import select
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar, overload

from rallypoint import notices
from rallypoint.base.private_files import make_private, open_regular
from rallypoint.inprocess import torch_switches
from rallypoint.inprocess.aborting import Aborting, destroy_groups, run_hooks
from rallypoint.inprocess.interruption import Interruption
from rallypoint.notices import FIFO_PREFIX, LEFT_PREFIX, PREPARED_PREFIX, ROUND_PREFIX, STANDBY_VARIABLE

if TYPE_CHECKING:
    from rallypoint.inprocess.agreement import Stateful

LEAVE, ENTER, RANK = "leave", "enter", "rank"


class Order(NamedTuple):
    """An order from the agent: `verb` is LEAVE or ENTER with a round, or RANK with a local rank."""

    verb: str
    number: int


class Channel:
    def __init__(self, folder: str, rank: str) -> None:
        """Create and open the FIFO. The agent does not see it before `announce`.

        Raises:
            OSError: no space is left, the folder is not private, a FIFO cannot be created, or another process reads
                the FIFO of this local rank.
        """
        self._folder, self.rank = folder, rank
        self._path = os.path.join(folder, FIFO_PREFIX + rank)
        self._rest = b""
        make_private(folder)
        _refuse_if_read(self._path)
        self._draft = os.path.join(folder, f".{FIFO_PREFIX}{rank}.{os.getpid()}")
        with suppress(FileNotFoundError):
            os.unlink(self._draft)
        os.mkfifo(self._draft, 0o600)
        try:
            # Open it for writing too, so that reading never reaches the end; and for appending, so that a stop does not
            # mistake it for a checkpoint that is being written.
            self.fd = os.open(self._draft, os.O_RDWR | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            os.unlink(self._draft)
            raise

    def announce(self) -> None:
        os.rename(self._draft, self._path)

    def close(self) -> None:
        os.close(self.fd)

    def wake(self) -> None:
        with suppress(OSError):
            os.write(self.fd, b"\n")

    def orders(self) -> list[Order]:
        """Read the orders that have arrived, when `fd` is readable."""
        try:
            lines = (self._rest + os.read(self.fd, 4096)).split(b"\n")
        except BlockingIOError:
            return []
        self._rest = lines.pop()
        return [order for line in lines if (order := parse(line)) is not None]

    def tell_left(self, round_: int) -> None:
        """Report to the agent that this process has left the round and is waiting for the next. Raises OSError."""
        self._create_file(f"{LEFT_PREFIX}{self.rank}.{round_}")

    def tell_prepared(self) -> None:
        """Report to the agent that this process has prepared its function. Raises OSError."""
        self._create_file(f"{PREPARED_PREFIX}{self.rank}")

    def _create_file(self, name: str) -> None:
        path = os.path.join(self._folder, name)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))

    def environment(self, round_: int) -> dict[str, str | None]:
        """The round's variables; None means to remove the variable.

        Raises:
            OSError, ValueError, KeyError, TypeError: the file is missing or invalid.
        """
        path = os.path.join(self._folder, f"{ROUND_PREFIX}{self.rank}.json")
        with open(open_regular(path), encoding="utf-8") as file:
            content = json.load(file)
        if content["round"] != round_:
            raise ValueError(f"{path} belongs to round {content['round']!r}, not to round {round_}")
        variables = content["environment"]
        if not all(isinstance(value, str | None) for value in variables.values()):
            raise ValueError(f"{path} contains variables that are not text")
        return {str(name): value for name, value in variables.items()}


def parse(line: bytes) -> Order | None:
    verb, _, number = line.decode("ascii", "replace").partition(" ")
    if verb in (LEAVE, ENTER, RANK) and number.isdecimal() and number.isascii():
        return Order(verb, int(number))
    return None


def _refuse_if_read(path: str) -> None:
    """Raise FileExistsError if another process reads the FIFO."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC))
    except OSError:  # missing, or a dead process left it without a reader
        return
    raise FileExistsError(f"another process of this local rank is already resumable: {path} has a reader")


P = ParamSpec("P")
R = TypeVar("R")

ECHO_SECONDS = 2.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.25
"""Seconds between interruptions, doubled each time, while the function does not end. An interruption may have no effect
because it would do harm, because the function is handling an exception, or because the function catches it."""
_ABORT_EVERY = 0.25
"""Seconds between runs of the hooks while the function does not end: it may create again what they abort."""


class ResumableLoop:
    """Calls the function for one round after another. Owns the channel, and knows the rounds."""

    def __init__(self, folder: str, rank: str, *, standby: bool = False) -> None:
        """Announce this process as resumable. Raises OSError or ValueError with the reason if this is impossible."""
        self.survived = False
        """Whether the function ran here in an earlier round."""
        self._standby = standby
        self._preparing = True
        self._ended = self._entered = self._current = self._left = -1
        """The last round whose end was announced; whose start was announced; the function's; the last round left."""
        self._changed = Condition()
        self._interruption = Interruption(self._has_ended, ResumableLoop._call.__code__)
        self._switches: torch_switches.Switches | None = None
        """torch's switches at the time when the function was called."""
        self._aborting = Aborting()
        self._pid = os.getpid()
        self._stopped = False
        self._channel = Channel(folder, rank)
        self._listener = Thread(target=self._listen, name="rallypoint-inprocess", daemon=True)
        self._listener.start()
        self._channel.announce()

    def run(self, prepare: Callable[[], object] | None, call: Callable[[], R]) -> R:
        """Prepare the function if needed, and call it for each round until it returns.

        Raises:
            BaseException: whatever `prepare` raised, or the function while its round continued.
        """
        if prepare is not None:
            prepare()
            self._channel.tell_prepared()
        with self._changed:
            self._preparing = False
        if self._standby or self._has_ended():
            self._wait_for_round()
        while not (returned := self._call(call)):
            self._leave()
            self._wait_for_round()
        return returned[0]

    def stop(self) -> None:
        if self.is_here():
            self._stopped = True
            self._channel.wake()
            self._listener.join()  # so that the FIFO has no reader when the next function wants one

    def is_here(self) -> bool:
        """Whether this is the announced process, and not a fork of it."""
        return os.getpid() == self._pid

    def after_fork(self) -> None:
        """Release the original process's resources in a fork."""
        self._interruption.inside = False
        self._channel.close()

    # On the main thread

    def _call(self, call: Callable[[], R]) -> list[R]:
        """Call the function once. Returns its result in a list, which is empty if it left because its round ended."""
        interruption = self._interruption
        self._switches = torch_switches.read()
        try:
            try:
                interruption.enter()
                value = call()
            finally:
                interruption.leave()
        except (SystemExit, KeyboardInterrupt):
            interruption.leave()
            raise
        except BaseException as error:
            interruption.leave()  # an interruption may have arrived just before the line above
            if not self.is_here() or not self._ends_soon():
                raise
            _drop_variables(error)
            return []
        return [value] if not interruption.raised else []

    def _ends_soon(self) -> bool:
        with self._changed:
            return self._changed.wait_for(self._has_ended, ECHO_SECONDS)

    def _leave(self) -> None:
        with self._changed:  # so that no new run starts
            self._aborting.wait()
        run_hooks()  # again, for groups that were created meanwhile
        destroy_groups()
        torch_switches.restore(self._switches)
        self.survived = True
        self._left = self._ended
        self._channel.tell_left(self._left)

    def _wait_for_round(self) -> None:
        while self._entered <= self._left:
            with self._changed:
                self._changed.wait_for(lambda: max(self._entered, self._ended) > self._left)
            if self._entered <= self._left < self._ended:  # a round that ended without us
                self._left = self._ended
                self._channel.tell_left(self._left)
        for name, value in self._channel.environment(self._entered).items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._current = self._entered

    def _has_ended(self) -> bool:
        """Whether the function's current or last round has ended. The number of the first round is unknown."""
        return self._ended >= max(self._current, 0)

    # On the listening thread

    def _listen(self) -> None:
        poller, pause, abort_at = select.poll(), 0.0, -math.inf
        poller.register(self._channel.fd, select.POLLIN)
        while not self._stopped:
            if poller.poll(pause * 1000 if pause else None):
                for order in self._channel.orders():
                    self._follow_order(order)
            with self._changed:
                interrupts = self._interruption.inside and self._has_ended()
                if interrupts and (now := time.monotonic()) >= abort_at:
                    self._aborting.start()
                    abort_at = now + _ABORT_EVERY
            if interrupts:
                self._interruption.send()
                pause = min(2 * pause, _LONGEST_PAUSE) or _FIRST_PAUSE
            else:
                pause, abort_at = 0.0, -math.inf
        self._channel.close()

    def _follow_order(self, order: Order) -> None:
        with self._changed:
            if order.verb == RANK:
                self._channel.rank = str(order.number)
            elif order.verb == LEAVE:
                self._ended = max(self._ended, order.number)
                if self._preparing:
                    self._left = self._ended
                    with suppress(OSError):  # the agent then ends this process, after the usual time
                        self._channel.tell_left(self._left)
            else:
                self._entered = max(self._entered, order.number)
            self._changed.notify_all()


def _drop_variables(error: BaseException) -> None:
    """Drop the references from frames of ended functions to models, groups and loaders."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        traceback.clear_frames(following.__traceback__)
        following = following.__context__


_MAKES_AN_OBJECT = 0x20 | 0x80 | 0x200
"""Code flags of generators and coroutines. Importing them from `inspect` would be half of this package's cost."""


class Round(NamedTuple):
    """The current round; the function's first argument.

    `survived`: this process ran in an earlier round, perhaps without finishing a step. Its results are in `memory`, a
    dict that outlives rounds; empty in a new process.
    `restart_count`: how many restarts the job has used, as in `TORCHELASTIC_RESTART_COUNT`.
    `prepared`: the result of `prepare` in this process; None without it.
    """

    survived: bool
    memory: dict[str, Any]
    restart_count: int
    prepared: Any = None

    def agree(self, state: Stateful | Mapping[str, Stateful] | None) -> int | None:
        """Make all workers continue from the same step. All of them must call this, after `init_process_group`.

        `memory["step"]` says how far a worker is. Update it together with the state that the step changes, in one
        `uninterrupted` block. A worker without it starts from nothing.

        Args:
            state: the state that is the same in all workers: an object with `state_dict` and `load_state_dict`, or a
                dict of such objects. The worker that is furthest sends its own, through host memory, and workers that
                are behind load it. None if each worker has only a part: no state can then be sent, and the result is a
                step only if all workers have finished the same one.

        Returns:
            The step that all workers have now finished, also in `memory["step"]`. None if they must load the checkpoint
            or start from the beginning, because no worker has a state from which the others could continue.
        """
        from rallypoint.inprocess.agreement import agree

        return agree(self.memory, state)


_memory: dict[str, Any] = {}
_loop: ResumableLoop | None = None
"""Set while a function is called for each round."""
_survived = False


@overload
def resumable(function: Callable[Concatenate[Round, P], R], /) -> Callable[P, R]: ...


@overload
def resumable(
    *, prepare: Callable[..., object] | None = None
) -> Callable[[Callable[Concatenate[Round, P], R]], Callable[P, R]]: ...


def resumable(function: Callable[..., Any] | None = None, /, *, prepare: Callable[..., object] | None = None) -> Any:
    """Call `function` for each round, in this process, until it returns. A decorator, with or without arguments.

    Args:
        function: accepts the `Round`, and then the arguments of the call, which are the same in each round.
        prepare: called once in each process, before its first round, with the arguments of the call; `round.prepared`
            is its result. With `--standby`, processes without a rank also run it, ahead of a failure. So `prepare` and
            the code before the call must not use ranks, devices or other workers.

    Returns:
        A function without the first argument. It returns or raises whatever the last call returned or raised. Another
        such function called from within is called once, for the same round.

    Raises:
        TypeError: the function is a generator or a coroutine; calling one only creates an object.
    """
    if function is None:
        return lambda decorated: _for_each_round(decorated, prepare)
    return _for_each_round(function, prepare)


def _for_each_round(function: Callable[..., R], prepare: Callable[..., object] | None) -> Callable[..., R]:
    for callee in (function, prepare):
        if getattr(getattr(callee, "__code__", None), "co_flags", 0) & _MAKES_AN_OBJECT:
            raise TypeError(f"{callee!r} cannot be made resumable; wrap the plain function that runs it")

    @wraps(function)
    def for_each_round(*args: Any, **kwargs: Any) -> R:
        prepared: object = None

        def begin() -> None:
            nonlocal prepared
            prepared = None if prepare is None else prepare(*args, **kwargs)

        def call() -> R:
            return function(_round(prepared), *args, **kwargs)

        global _loop, _survived
        loop = _announced()
        if loop is None:
            begin()
            return call()
        _loop = loop
        try:
            return loop.run(None if prepare is None else begin, call)
        finally:
            _survived, _loop = _survived or loop.survived, None
            loop.stop()

    return for_each_round


def _round(prepared: object) -> Round:
    survived = _survived or (_loop is not None and _loop.survived)
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return Round(survived, _memory, int(count) if count.isdecimal() else 0, prepared)


def _announced() -> ResumableLoop | None:
    folder, place = os.environ.get(notices.VARIABLE), os.environ.pop(STANDBY_VARIABLE, None)
    rank = place or os.environ.get("LOCAL_RANK")
    on_main_thread = threading.current_thread() is threading.main_thread()
    if not folder or not rank or (_loop is not None and on_main_thread):
        return None
    try:
        return ResumableLoop(folder, rank, standby=place is not None)
    except (OSError, ValueError, AttributeError) as error:
        if place is not None:
            raise
        from warnings import warn

        warn(
            f"this worker will be restarted when a round ends, and cannot continue: {error}",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


def _after_fork() -> None:
    """Release the parent's resources in a forked process, such as a data loader's worker."""
    global _loop
    loop, _loop = _loop, None
    if loop is not None:
        with suppress(OSError):
            loop.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
