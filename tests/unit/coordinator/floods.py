"""A sample of each request of the protocol, by sender: a new request without a sample fails the tests of floods.

Each sample names the round and the places that the sender has; otherwise the coordinator would refuse it at a glance.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from rallypoint.control.membership.state import (
    Close,
    Drain,
    Fail,
    NodeInfo,
    Preempt,
    PreemptJob,
    RecordProgress,
    ReportQuiet,
    Succeed,
)
from rallypoint.control.protocol import messages
from rallypoint.control.protocol.messages import (
    CauseClues,
    CauseSought,
    CollectedPart,
    CollectKind,
    ConfirmRequest,
    Fault,
    HangReport,
    Heartbeat,
    JoinRequest,
    LeaveRequest,
    NextStore,
    NodeReport,
    ProgressRequest,
    ResumeRequest,
    Taken,
)
from rallypoint.failures.cause import Cause
from rallypoint.observe.watching import messages as watching
from rallypoint.observe.watching.messages import (
    CollectCommand,
    DrainCommand,
    FaultCommand,
    ListRequest,
    ResizeCommand,
    RestartCommand,
    StopCommand,
    WatchRequest,
)

_INFO = NodeInfo("default", 1, "127.0.0.1", 7000, max_restarts=1000)
CAUSE = Cause(0, 0, "host", 42, -9, "Signal 9 (SIGKILL)", "Traceback\n" * 1000, 1e9, "/e.json")
_BY = "ann@login"

_SAMPLES: tuple[Any, ...] = (
    JoinRequest(_INFO, 600.0),
    NextStore(0, 7001),
    LeaveRequest(wants_reply=True),
    Fail(0, CAUSE, 1000),
    Succeed(0),
    Drain(0),
    Preempt(0, 30.0, "is drained"),
    PreemptJob(30.0, "received SIGUSR2"),
    RecordProgress(0, 7),
    ReportQuiet(0),
    Close(detail="on request"),
    Heartbeat(),
    ProgressRequest(),
    ConfirmRequest(7),
    ResumeRequest("another", _INFO, 0, 0, 1000, -1, 0, round_over=False),
    NodeReport(0, (7,) * 8, 100, 2.0, (1.0,) * 8, (100,) * 8),
    CollectedPart(1, b"x" * 1000, is_last=True),
    HangReport(1, 0, "two\nlines" * 1000),
    Taken(1),
    CauseSought(0),
    CauseClues(0, (("still in all_reduce (train.py:41)", (0, 1)),)),
    WatchRequest(),
    WatchRequest(after=0),
    WatchRequest(after=1 << 40),
    WatchRequest(first=0),
    WatchRequest(node="0"),
    ListRequest(),
    RestartCommand(_BY),
    DrainCommand(_BY, "1"),
    StopCommand(_BY),
    ResizeCommand(_BY, 1, 1000, force=True),
    FaultCommand(_BY, Fault.HANG, 0, "", 5.0),
    *(CollectCommand(_BY, kind) for kind in CollectKind),
    CollectCommand(_BY, CollectKind.LOGS, cursor=1),
)


def _kinds(union: Any) -> list[type]:
    return [each for kind in get_args(union) for each in (_kinds(kind) or [kind])]


def samples_of(union: Any) -> Mapping[str, Any]:
    """The samples of all requests of a union, by a name. KeyError: a request has none."""
    found: dict[str, Any] = {}
    for kind in _kinds(union):
        of_kind = [each for each in _SAMPLES if type(each) is kind]
        if not of_kind:
            raise KeyError(f"there is no sample of {kind.__name__}; add one in {__name__}")
        found |= {f"{kind.__name__}{f' {number}' if number else ''}": each for number, each in enumerate(of_kind)}
    return found


OF_NODES = samples_of(messages.Request)
OF_WATCHERS = samples_of(watching.WatcherRequest | watching.ListRequest)
