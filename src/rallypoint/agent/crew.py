"""The workers of one node, as the agent's loop sees them.

What a stop goes through, from the policy's word to the kernel; each layer knows only the next one:

    agent/policy    Stop                      one at a time; `WorkersStopped` follows
    agent/loop      Crew.stop -> Stopping     waits on its `fds` until its `wake_at`, beside all else, and calls `step`
    agent/api       _begin_stop               what users override; those who only have `_stop_workers` block in here
    agent/local     PContext.begin_close
    workers/context _Closing                  the ladder, then outputs carried through and descriptors given back
    workers/stop    Ladder                    signal, grace, stacks, SIGKILL, giving up
      Writing       who is spared, since it is in the middle of a file
      WorkerProcess   a signal to the worker alone, through its pidfd
      workers/sweep   all that workers have left: asks the guardian, or, where that is lost, looks into /proc
    workers/guardian  SIGTERM, then SIGKILL to all below it, until nothing is left; its keeper kills what it has left
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from rallypoint.agent.spec import RunResult, WorkerGroup
from rallypoint.agent.steps import Stop
from rallypoint.rendezvous.messages import Placement
from rallypoint.workers.stop import Stopping


class Minding(Protocol):
    """What watches workers beside their exits (`watchdog.minder`). Nothing here blocks."""

    def fds(self) -> list[int]:
        """Descriptors that become readable when there is something to do."""
        ...

    def wake_at(self) -> float:
        """When there is something to do by itself, in seconds on the monotonic clock; infinite for never."""
        ...

    def step(self) -> None:
        """Do what is due; `look` tells what came of it."""
        ...


class Warmth(Minding, Protocol):
    """What workers are forked from (`workers.warm.starts`)."""

    @property
    def importing(self) -> bool:
        """Whether workers that are to start shall wait, since it will start them sooner than they would start cold."""
        ...


@dataclass(frozen=True)
class Crew:
    """What can be done with them. No call waits for other nodes.

    `start` takes up a placement and starts them. `stop` begins to stop them as the step says; it returns None if they
    are gone already. `shutdown` stops them for good and returns when they are gone; always called at the end. `pass_on`
    hands a signal that this agent was sent to each that runs and was not sent it too, `reached` are the signals that
    all were sent a moment ago, `forwarding` is what hands signals on later. `look` tells how they are, `running` which
    local ranks have not ended; `exit_fds` become readable when one ends (None: they must be asked). `finished` is
    called once all have succeeded, `ended` when all of a round are gone, with how they were found before that (None:
    they ran). `stopped` gives the global ranks of those that were sent a signal to stop while they ran, `allowed` how
    many failures the job may survive as far as this node is concerned. `grace` is how many seconds a stop leaves them.
    `minder` is what else watches them now, if anything does, `warmth` what they are forked from, if they are, `shown`
    what the health check shows of them.
    """

    group: WorkerGroup
    grace: Callable[[], float]
    start: Callable[[Placement], None]
    stop: Callable[[Stop], Stopping | None]
    shutdown: Callable[[int], None]
    pass_on: Callable[[int], None]
    look: Callable[[], RunResult]
    running: Callable[[], Collection[int]]
    exit_fds: Callable[[], list[int] | None]
    finished: Callable[[], None]
    stopped: Callable[[], tuple[int, ...]]
    allowed: Callable[[], int]
    ended: Callable[[RunResult | None], None] = lambda _result: None
    reached: Callable[[], frozenset[int]] = frozenset
    forwarding: Callable[[], Minding | None] = lambda: None
    in_order: Callable[[], bool] = bool
    terminated: Callable[[], float] = lambda: math.inf
    minder: Callable[[], Minding | None] = lambda: None
    warmth: Callable[[], Warmth | None] = lambda: None
    shown: Callable[[], Mapping[str, object]] = dict
