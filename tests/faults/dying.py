"""`rallyrun` that kills itself at a step of its own as the coordinator of a job on etcd: `DIES_AT` says at which.

A step is the moment before or after a request to etcd that can change something, and before or after a notice is handed
to a node. What the process is in the middle of, it never ends.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from rallypoint.cli.rallyrun import main
from rallypoint.control.coordinator.dispatcher import Dispatcher
from rallypoint.control.etcd.client import EtcdClient

P = ParamSpec("P")
T = TypeVar("T")

_steps = itertools.count(1)


def _step() -> None:
    if next(_steps) == int(os.environ["DIES_AT"]):
        os.kill(os.getpid(), signal.SIGKILL)


def _dying(function: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        _step()
        result = function(*args, **kwargs)
        _step()
        return result

    return wrapped


if __name__ == "__main__":
    for owner, name in (
        (EtcdClient, "txn"),
        (EtcdClient, "lease_grant"),
        (EtcdClient, "watch"),
        (Dispatcher, "_send"),
    ):
        setattr(owner, name, _dying(getattr(owner, name)))
    code = main()
    sys.stderr.write(f"it had {next(_steps) - 1} steps\n")
    sys.exit(code)
