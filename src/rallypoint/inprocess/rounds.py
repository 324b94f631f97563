"""`resumable`, and the `Round` that the function is called with."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from rallypoint import notices
from rallypoint.inprocess.survivor import Survivor

P = ParamSpec("P")
R = TypeVar("R")


_MAKES_AN_OBJECT = 0x20 | 0x80 | 0x200
"""Code flags of generators and coroutines, as in `inspect`, whose import would be half of this package's cost."""


class Round(NamedTuple):
    """The round in which the function runs; its first argument.

    `survived`: this process ran in an earlier round, perhaps without finishing a step: what it has is in `memory`, a
    dict that outlives rounds, empty in a new process.
    `restart_count`: restarts that the job has used, as in `TORCHELASTIC_RESTART_COUNT`.
    """

    survived: bool
    memory: dict[str, Any]
    restart_count: int


_memory: dict[str, Any] = {}
_survivor: Survivor | None = None
"""Set while a function is called for each round."""
_survived = False


def resumable(function: Callable[Concatenate[Round, P], R]) -> Callable[P, R]:
    """Call `function` for each round, in this process, until it returns. A decorator.

    Args: `function`: takes the `Round`, and then the arguments of the call, which are the same in each round.

    Returns:
        A function without the first argument. It returns what the last call returned, or raises what the last call
        raised. Another such function called from within is called once, for the same round.

    Raises:
        TypeError: it is a generator or a coroutine, where a call only makes an object.
    """
    if getattr(getattr(function, "__code__", None), "co_flags", 0) & _MAKES_AN_OBJECT:
        raise TypeError(f"{function!r} cannot be resumable; wrap the plain function that runs it")

    @wraps(function)
    def for_each_round(*args: P.args, **kwargs: P.kwargs) -> R:
        def call() -> R:
            return function(_round(), *args, **kwargs)

        global _survivor, _survived
        survivor = _announced()
        if survivor is None:
            return call()
        _survivor = survivor
        try:
            return survivor.run(call)
        finally:
            _survived, _survivor = _survived or survivor.survived, None
            survivor.stop()

    return for_each_round


def _round() -> Round:
    survived = _survived or (_survivor is not None and _survivor.survived)
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return Round(survived, _memory, int(count) if count.isdecimal() else 0)


def _announced() -> Survivor | None:
    """Announce this process as one that can go on; None if there is no agent to tell, or if it cannot go on."""
    folder, rank = os.environ.get(notices.VARIABLE), os.environ.get("LOCAL_RANK")
    on_main_thread = threading.current_thread() is threading.main_thread()
    if not folder or not rank or (_survivor is not None and on_main_thread):
        return None
    try:
        return Survivor(folder, rank)
    except (OSError, ValueError, AttributeError) as error:
        from warnings import warn

        warn(
            f"this worker will be restarted at the end of a round, and not kept: {error}", RuntimeWarning, stacklevel=3
        )
        return None


def _after_fork() -> None:
    """Runs in a forked process, such as a data loader's worker."""
    global _survivor
    survivor, _survivor = _survivor, None
    if survivor is not None:
        with suppress(OSError):
            survivor.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
