"""A sample of each request of the protocol, by sender. A new request without a sample fails the flood tests.

Each sample has the sender's round and place; otherwise the coordinator would refuse it at a glance.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from rallypoint.control.membership import state
from rallypoint.control.protocol import messages
from rallypoint.failures.cause import Cause
from rallypoint.observe.watching import messages as watching

_INFO = state.NodeInfo("default", 1, "127.0.0.1", 7000, max_restarts=1000)
CAUSE = Cause(0, 0, "host", 42, -9, "Signal 9 (SIGKILL)", "Traceback\n" * 1000, 1e9, "/e.json")
_BY = "ann@login"

_SAMPLES: tuple[Any, ...] = (
    messages.JoinRequest(_INFO, 600.0),
    messages.NextStore(0, 7001),
    messages.LeaveRequest(wants_reply=True),
    state.Fail(0, CAUSE, 1000),
    state.Succeed(0),
    state.Drain(0),
    state.Preempt(0, 30.0, "is drained"),
    state.PreemptJob(30.0, "received SIGUSR2"),
    state.RecordProgress(0, 7),
    state.ReportQuiet(0),
    state.Close(detail="on request"),
    messages.Heartbeat(),
    messages.ProgressRequest(),
    messages.ConfirmRequest(7),
    messages.ResumeRequest("another", _INFO, 0, 0, 1000, -1, 0, round_over=False),
    messages.NodeReport(0, (7,) * 8, 100, 2.0, (1.0,) * 8, (100,) * 8),
    messages.CollectedPart(1, b"x" * 1000, is_last=True),
    messages.HangReport(1, 0, "two\nlines" * 1000),
    messages.Taken(1),
    messages.CauseSought(0),
    messages.CauseClues(0, (("still in all_reduce (train.py:41)", (0, 1)),)),
    watching.WatchRequest(),
    watching.WatchRequest(after=0),
    watching.WatchRequest(after=1 << 40),
    watching.WatchRequest(first=0),
    watching.WatchRequest(node="0"),
    watching.ListRequest(),
    watching.RestartCommand(_BY),
    watching.DrainCommand(_BY, "1"),
    watching.StopCommand(_BY),
    watching.ResizeCommand(_BY, 1, 1000, force=True),
    watching.FaultCommand(_BY, messages.Fault.HANG, 0, "", 5.0),
    *(watching.CollectCommand(_BY, kind) for kind in messages.CollectKind),
    watching.CollectCommand(_BY, messages.CollectKind.LOGS, cursor=1),
)


def _kinds(union: Any) -> list[type]:
    return [kind for member in get_args(union) for kind in (_kinds(member) or [member])]


def samples_of(union: Any) -> Mapping[str, Any]:
    """The samples of all requests of a union, by name. KeyError: a request has no sample."""
    found: dict[str, Any] = {}
    for kind in _kinds(union):
        of_kind = [sample for sample in _SAMPLES if type(sample) is kind]
        if not of_kind:
            raise KeyError(f"there is no sample of {kind.__name__}; add one in {__name__}")
        found |= {f"{kind.__name__}{f' {number}' if number else ''}": sample for number, sample in enumerate(of_kind)}
    return found


OF_NODES = samples_of(messages.Request)
OF_WATCHERS = samples_of(watching.WatcherRequest | watching.ListRequest)
