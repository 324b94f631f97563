"""Every difference that a case may meet: the facts, torchrun's behavior and ours, and the reason.

A difference between the two sides that is not here is a defect of ours. `ALWAYS` applies to every case; an entry in
`DIFFERENCES` applies to the cases that name it, which must meet it in each of its facts.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from ipaddress import ip_address
from typing import NamedTuple

ABSENT = "(absent)"
"""The value of a fact that one side does not have."""

How = Callable[[object, object], bool]
"""Whether torchrun's value and ours differ as they are meant to."""


class Difference(NamedTuple):
    """Why we differ, and how: patterns of facts' names, and what holds of the two values there."""

    why: str
    facts: Mapping[str, How]

    def explains(self, fact: str, theirs: object, ours: object) -> str | None:
        """The pattern of the fact if it may differ so."""
        for pattern, how in self.facts.items():
            if fnmatchcase(fact, pattern) and how(theirs, ours):
                return pattern
        return None


def _only_ours(theirs: object, ours: object) -> bool:
    return theirs == ABSENT and ours != ABSENT


def _only_torchs(theirs: object, ours: object) -> bool:
    return theirs != ABSENT and ours == ABSENT


def _both(theirs: object, ours: object) -> bool:
    return ABSENT not in (theirs, ours)


def _values(old: object, new: object) -> How:
    return lambda theirs, ours: (theirs, ours) == (old, new)


def _address(theirs: object, ours: object) -> bool:
    try:
        return theirs == socket.getfqdn() and bool(ip_address(str(ours)))
    except ValueError:
        return False


def _host(theirs: object, ours: object) -> bool:
    return theirs == socket.getfqdn() and str(ours).startswith(socket.gethostname())


def _absolute(theirs: object, ours: object) -> bool:
    return str(ours) == f"<here>/{theirs}"


def _says_nothing(theirs: object, ours: object) -> bool:
    return str(theirs).startswith(("To enable traceback see:", "Signal ")) and ours not in ("", ABSENT)


def _with(more: str) -> How:
    """Ours has one event more, of this state."""
    return lambda theirs, ours: (
        [each for each in _names(ours) if each not in _names(theirs)] == [more]
        and all(each in _names(ours) for each in _names(theirs))
    )


def _failed_agent(theirs: object, ours: object) -> bool:
    return sorted(each.replace("SUCCEEDED AGENT", "FAILED AGENT") for each in _names(theirs)) == _names(ours)


def _names(events: object) -> list[str]:
    """Names and sources of events, as `stderr` tells them."""
    assert isinstance(events, list)
    return sorted(f"{each[0].rpartition('.')[2]} {each[1]}" for each in events)


ALWAYS = Difference(
    "the contract's section 10, and what ours adds to every worker and every report",
    {
        "worker/*/env/RALLYPOINT_NOTICES": _only_ours,  # a worker can save before it is stopped
        "worker/*/env/PYTHONFAULTHANDLER": _values(ABSENT, "1"),  # the stacks show where a worker hangs
        "worker/*/env/TORCHELASTIC_ERROR_FILE": _absolute,  # a worker may change its folder
        "worker/*/env/MASTER_ADDR": _address,
        "stderr/*/info/master_addr": _address,  # an address that the others reach, not a name that they may not know
        "stderr/*/report/root/host": _host,  # no name server is asked for this host's name
        "stderr/*/report/root/traceback": _says_nothing,  # the cause is shown, even without `record`
        "file/tmp/<temporary>*": _values("(folder)", ABSENT),  # no empty log folders are left behind
        "file/*/rank_*_attempt_*": _only_ours,  # logs are found by global rank too
    },
)

DIFFERENCES = {
    "a missing script starts nothing": Difference(
        "a script that does not exist is found before the rendezvous", {"stderr/0/report/*": _only_torchs}
    ),
    "functions lead a session": Difference(
        "a stop finds what workers have left, so those that are functions lead a session of their own too",
        {"worker/*/leads a session": _values(False, True)},
    ),
    "functions write at once": Difference(
        "what functions write is read at once, as what programs write is",
        {"worker/*/unbuffered": _values(False, True)},
    ),
    "a telling signal": Difference(
        "SIGUSR1 tells something and asks nobody to end: it is passed on, and ends nothing by itself",
        {"exit/0": _values(1, 0)},
    ),
    "all nodes stop": Difference("a failure on one node is told to all at once", {"exit/1": _values(0, 1)}),
    "a failed job's agent has failed": Difference(
        "the agent of a job that has failed has not succeeded", {"stderr/0/events": _failed_agent}
    ),
    "each failure is an event": Difference(
        "a failure that a restart followed is one all the same", {"stderr/0/events": _with("FAILED WORKER")}
    ),
    "one restart count": Difference(
        "the job has one account of restarts, and so have its workers and their log folders",
        {
            "worker/1-1-second/env/TORCHELASTIC_RESTART_COUNT": _values("0", "1"),
            "worker/1-1-second/env/TORCHELASTIC_ERROR_FILE": _both,
        },
    ),
    "earlier logs are kept": Difference(
        "the logs of an earlier round are evidence", {"file/logs1/job_<random>/attempt_1*": _only_ours}
    ),
    "no folder yet": Difference(
        "a log folder is made when workers are started",
        {"stderr/0/info/log_dir": _values("<here>/tmp/<temporary>", "None")},
    ),
    "no pickle": Difference("what agents tell each other is not pickled", {"file/store": _both}),
    "any id": Difference(
        "a slash in a job's id is no reason to fail: the folder's name has another character there",
        {"exit/0": _values(1, 0), "file/logs/a_b_<random>*": _only_ours},
    ),
    "a damaged error file": Difference(
        "torchrun's agent ends itself over it; ours reports the worker's failure, and the damage",
        {"stderr/0/report/*": _only_ours},
    ),
    "the launcher's own file is written": Difference(
        "schedulers shall learn of each failure (section 7.4 calls it a known defect)", {"file/mine.json": _only_ours}
    ),
    "other words": Difference("the sentence about a mistake is ours", {"file/mine.json": _both}),
    "no folder without workers": Difference(
        "where no worker was started there is nothing to log", {"file/logs0": _values("(folder)", ABSENT)}
    ),
}
