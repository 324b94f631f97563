"""The workers that an agent runs, and what it knows about them (contract section 5.1)."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum

from rallypoint.agent.options import Features
from rallypoint.base.errors import UserError
from rallypoint.base.light_dataclasses import dataclass, field
from rallypoint.base.light_typing import TYPE_CHECKING, Any, Protocol
from rallypoint.base.log import printable
from rallypoint.control.protocol.ranges import is_in_range, range_of
from rallypoint.failures.cause import NO_RESTARTS, Cause, Ending, Restarts
from rallypoint.rendezvous.handler import RendezvousHandler

if TYPE_CHECKING:
    from rallypoint.base.numa import NumaOptions
    from rallypoint.control.protocol.messages import Placement
    from rallypoint.failures.failure import ProcessFailure
    from rallypoint.store.api import Store

DEFAULT_ROLE = "default"


class WorkerState(str, Enum):  # noqa: UP042 - its `str` is torch's: with the name of the class
    """The state of a worker group."""

    UNKNOWN = "UNKNOWN"
    """The agent lost track of the workers, and cannot recover."""
    INIT = "INIT"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    """Running, but stuck."""
    STOPPED = "STOPPED"
    """Stopped by the agent, to be restarted."""
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Whether workers in this state have processes."""
        return state in {WorkerState.HEALTHY, WorkerState.UNHEALTHY}


@dataclass
class WorkerSpec:
    """The specification of the workers of one node.

    Args:
        role: the role of the workers; workers of the same role are ranked among themselves too.
        local_world_size: the number of workers on this node.
        rdzv_handler: the agent's rendezvous handler.
        fn: deprecated alias of `entrypoint`.
        entrypoint: a program to run, or a function to call.
        args: its arguments; `${local_rank}` in them is replaced for each worker.
        max_restarts: how many failures the job can survive.
        monitor_interval: seconds between polls of workers whose exits cannot wake the agent. To be safe, the others are
            polled once per minute, or once per monitor interval if that is longer.
        master_port: overrides the workers' MASTER_PORT.
        master_addr: overrides the workers' MASTER_ADDR.
        local_addr: the address at which other nodes reach this one.
        event_log_handler: the name of the handler that receives events.
        numa_options: how to bind workers to processors; no binding by default.
        duplicate_stdout_filters: texts; lines of teed standard output that contain any of these are also written to one
            file.
        duplicate_stderr_filters: the same for standard error.
        virtual_local_rank: give every worker local rank 0 and one GPU.
        features: the options beyond torchrun.
        in_place_of: torch's own launcher, if the program started that.

    Raises:
        UserError: a number is out of range, or there is no entry point.
    """

    role: str
    local_world_size: int
    rdzv_handler: RendezvousHandler
    fn: Callable[..., Any] | None = None
    entrypoint: Callable[..., Any] | str | None = None
    args: tuple[Any, ...] = ()
    max_restarts: int = 3
    monitor_interval: float = 0.1
    master_port: int | None = None
    master_addr: str | None = None
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: NumaOptions | None = None
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    features: Features = Features()
    in_place_of: str = ""

    def __post_init__(self) -> None:
        if self.local_world_size <= 0:
            raise _unusable_in_text(f"local_world_size={self.local_world_size} is out of range; set it to 1 or more")
        for name, value in (("local_world_size", self.local_world_size), ("max_restarts", self.max_restarts)):
            if not is_in_range(name, value):  # a value out of range fits into no message to another node
                most = range_of(name).maximum
                raise _unusable_in_text(f"{name}={value} is out of range; set it to {most} or less")
        if self.monitor_interval <= 0:
            raise _unusable_in_text(
                f"monitor_interval={self.monitor_interval} is out of range; set it to more than 0 seconds"
            )
        if self.fn is not None:
            warnings.warn("WorkerSpec.fn is deprecated; use entrypoint", DeprecationWarning, stacklevel=3)
            self.entrypoint = self.fn
        if not self.entrypoint:
            raise _unusable_in_text("a worker spec needs an entry point: a program or a function")

    def get_entrypoint_name(self) -> str:
        """The base name of a program, the qualified name of a function."""
        assert self.entrypoint is not None
        if isinstance(self.entrypoint, str):
            return os.path.basename(self.entrypoint)
        return str(getattr(self.entrypoint, "__qualname__", self.entrypoint))

    def get_program_name(self) -> str:
        """Like `get_entrypoint_name`, but for an interpreter its script or module; safe in a line of text."""
        assert self.entrypoint is not None
        return printable(os.path.basename(program_name(self.entrypoint, self.args)))


def program_name(entrypoint: Callable[..., Any] | str, args: Sequence[Any]) -> str:
    """A readable name of the entry point: the script or module of an interpreter, else the program or function."""
    if not isinstance(entrypoint, str):
        return str(getattr(entrypoint, "__qualname__", entrypoint))
    if not os.path.basename(entrypoint).startswith("python"):
        return entrypoint
    return next((str(arg) for arg in args if not str(arg).startswith("-")), entrypoint)


def _unusable_in_text(text: str) -> UserError:
    from rallypoint.base.errors import user_error

    return user_error(text, AssertionError)


@dataclass(eq=False, repr=False)
class Worker:
    """One worker; its ranks are -1 until a round assigns them."""

    local_rank: int
    global_rank: int = -1
    role_rank: int = -1
    world_size: int = -1
    role_world_size: int = -1
    id: Any = None
    """Its process id."""

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in vars(self).items() if name != "id")

    __repr__ = __str__


class VariableSource(Protocol):
    """Adds variables to torch's variables in workers' environments."""

    @property
    def names(self) -> Collection[str]:
        """Names of all variables that it might add."""

    def variables(self, worker: Worker, environment: Mapping[str, str]) -> Mapping[str, str]:
        """Variables that one worker of the current round gets besides `environment`, which contains torch's."""


class WorkerGroup:
    """The workers of this node in the current round."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.workers = [Worker(local_rank) for local_rank in range(spec.local_world_size)]
        self.group_rank: int | None = None
        self.group_world_size: int | None = None
        self.master_addr: str | None = None
        self.master_port: int | None = None
        self.state = WorkerState.INIT
        self.placement: Placement | None = None
        """This node's place in the current round; None before the first one."""
        self.restarts = 0
        """How many restarts the job had used when these workers were started."""
        self.notices = ""
        """The workers' notice directory (`rallypoint.notices`); empty without one."""
        self.survived: tuple[int, ...] = ()
        """Local ranks of workers from the previous round that continue in their processes."""
        self.join_requested_at = 0.0
        """When this node requested the current round, on the loop's clock."""
        self.variable_sources: list[VariableSource] = []
        """Sources of additional variables for workers."""
        self.open_store: Callable[[], Store] | None = None
        self._store: Store | None = None

    @property
    def store(self) -> Store | None:
        """The round's store, connected on first use; None before the first round."""
        if self._store is None and self.open_store is not None:
            self._store = self.open_store()
        return self._store

    @store.setter
    def store(self, store: Store | None) -> None:
        self._store = store


@dataclass
class RunResult:
    """The result of a worker group.

    `return_values` and `failures` are by global rank, for this node's workers only. If the job failed, `cause` is its
    first failure on any node, and `ending` is why it ended. `stopped` lists the global ranks that the agent stopped.
    `restarts` counts the restarts that the job used. `reported_elsewhere`: whether other agents print the failure
    report.
    """

    state: WorkerState
    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)
    cause: Cause | None = None
    stopped: tuple[int, ...] = ()
    restarts: Restarts = NO_RESTARTS
    reported_elsewhere: bool = False
    ending: Ending = Ending.PROGRAM

    def is_failed(self) -> bool:
        """Whether the state is FAILED."""
        return self.state == WorkerState.FAILED

    def first_cause(self, exitcode: int = 0) -> Cause:
        """The first failure that is no consequence, else the first failure; if there is none, the group's failure."""
        if not self.failures:
            return node_failure(f"worker group {self.state.value}", exitcode=exitcode)
        host = socket.gethostname()
        in_order = sorted(self.failures.items(), key=lambda entry: entry[1].moment)
        causes = [Cause.from_failure(failure, rank, host) for rank, failure in in_order]
        if len(causes) == 1:
            return causes[0]
        from rallypoint.failures.kinds import may_be_consequence

        return next((cause for cause in causes if not may_be_consequence(cause)), causes[0])


def node_failure(text: str, ending: Ending = Ending.PROGRAM, exitcode: int = 0, host: str = "") -> Cause:
    """Create the cause of a failure of this or another node that no known worker started."""
    host = host or socket.gethostname()  # not getfqdn: an unreachable name server must not delay the message
    return Cause(-1, -1, host, os.getpid(), exitcode, text, "", time.time(), "", ending)
