"""Takes a candidate out of etcd. Pure: a sequence of requests.

Laws:

1. The last agent to leave leaves nothing of the job in etcd, even if its lease has ended just before. Keys of another
   launch of the job stay.
2. An agent that may not write may still end its lease.
"""

from __future__ import annotations

from rallypoint.election.context import StepContext
from rallypoint.election.keys import ElectionKeys, decode_snapshot
from rallypoint.election.steps import INFO, Procedure, Revoke, transact
from rallypoint.etcd.api import Compare, Delete, EtcdError, EtcdRefused, KeyValue, Operation, Range
from rallypoint.protocol.errors import RendezvousStateError

TIMEOUT = 2.0
"""Seconds for each of the last requests to etcd."""


def leave(keys: ElectionKeys, lease: int, met: str, context: StepContext, *, for_good: bool) -> Procedure[None]:
    """Give up our lease; where etcd cannot be reached, the lease runs out.

    Args:
        keys: of the job.
        lease: ours, 0 if there is none.
        met: the coordinator that this node was last in a session with, "" for none.
        context: takes lines of the log.
        for_good: whether this agent leaves the job: then it may be the last.
    """
    try:
        if for_good and (lease or met):
            yield from _delete_if_last(keys, lease, met, context)
        if lease:
            yield Revoke(lease, TIMEOUT)
    except EtcdError as error:
        context.log(INFO, "this agent cannot give up its lease in etcd, where it will run out: %s", error)


def _delete_if_last(keys: ElectionKeys, lease: int, met: str, context: StepContext) -> Procedure[None]:
    """If we are the last, take away what the job has kept."""
    own: tuple[Operation, ...] = (Delete(keys.node(lease)),) if lease else ()
    look = (Range(keys.nodes, prefix=True, limit=1), Range(keys.state))
    try:
        others, state = (yield from transact((), (*own, *look), timeout_s=TIMEOUT)).ranges
        if not others.kvs and state.kvs and _is_of(keys, state.kvs[0], met):
            yield from _delete_job_keys(keys, state.kvs[0])
    except EtcdRefused as error:  # etcd may refuse to write, and end leases all the same
        context.log(INFO, "what the job has written to etcd stays there until its lease ends: %s", error)


def _is_of(keys: ElectionKeys, state: KeyValue, met: str) -> bool:
    """Whether it is the state of the job that we were in."""
    try:
        return decode_snapshot(keys.state, state.value).incarnation == met
    except RendezvousStateError:
        return False


def _delete_job_keys(keys: ElectionKeys, state: KeyValue) -> Procedure[None]:
    # One that has registered meanwhile may have read the state already, to continue with it.
    alone = Compare(keys.nodes, "create_revision", "==", 0, prefix=True)
    unchanged = Compare(keys.state, "mod_revision", "==", state.mod_revision)
    cleared = yield from transact((alone, unchanged), (Delete(keys.state),), timeout_s=TIMEOUT)
    if cleared.succeeded and state.lease:
        yield Revoke(state.lease, TIMEOUT)
