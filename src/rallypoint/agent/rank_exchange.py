"""Exchanges data between agents over a round's store, if the rendezvous itself does not carry it.

Only for handlers of third parties, which provide a store, a rank and a size. Keys and values are those of the
contract's sections 3.2 and 5.5, so that agents of both kinds can share such a round. Our own data goes into keys of our
own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from rallypoint.base.log import get_logger
from rallypoint.ranks.assign import NodeRanks, assign_worker_ranks
from rallypoint.store.api import Store

log = get_logger(__name__)

_ROLE_INFO = "torchelastic/role_info/"
_ASSIGNED = "torchelastic/assigned_ranks/"
_TERMINAL = "torchelastic/agent/terminal_state"


_RESTARTS_PROPOSED = "rallypoint/restarts/proposed/"
_RESTARTS_AGREED = "rallypoint/restarts/agreed"


def exchange(
    store: Store, group_rank: int, group_world_size: int, role: str, local_world_size: int, restarts: int
) -> tuple[NodeRanks, int]:
    """This node's ranks, and the round's number of restarts, which is the largest that any node proposes.

    The number is exchanged with the ranks in keys of our own: a proposal is written before the ranks are requested, and
    the answer before they are given out. If an agent of torch's shares the round, or nothing is exchanged at all, there
    is no answer; then the node's own proposal holds.

    Args:
        store: the round's own store.
        group_rank: this node's group rank.
        group_world_size: the number of nodes that take part.
        role: the role of this node's workers.
        local_world_size: the number of these workers.
        restarts: this node's proposal: more than in any round that it knows.

    Raises:
        StoreTimeoutError: a node is missing after the store's timeout.
    """
    if _identical():
        return exchange_ranks(store, group_rank, group_world_size, role, local_world_size), restarts
    store.set(f"{_RESTARTS_PROPOSED}{group_rank}", str(restarts))
    agree = partial(_agree, store, group_world_size)
    ranks = exchange_ranks(store, group_rank, group_world_size, role, local_world_size, before_answering=agree)
    agreed = int(store.get(_RESTARTS_AGREED)) if store.check([_RESTARTS_AGREED]) else 0
    return ranks, max(agreed, restarts)  # a store that earlier rounds have used may still hold their answer


def _agree(store: Store, group_world_size: int) -> None:
    keys = [f"{_RESTARTS_PROPOSED}{rank}" for rank in range(group_world_size)]
    store.set(_RESTARTS_AGREED, str(max(int(store.get(key)) for key in keys if store.check([key]))))


def _identical() -> bool:
    return os.environ.get("TORCH_ELASTIC_WORKER_IDENTICAL") == "1"


def exchange_ranks(
    store: Store,
    group_rank: int,
    group_world_size: int,
    role: str,
    local_world_size: int,
    before_answering: Callable[[], None] = lambda: None,
) -> NodeRanks:
    """This node's ranks; waits for every node's role and size. See `exchange`.

    Args:
        before_answering: called on group rank 0 when all roles and sizes are there, before the ranks are assigned.
    """
    if _identical():
        return assign_worker_ranks([("", local_world_size)] * group_world_size)[group_rank]
    mine = {"role": role, "rank": group_rank, "local_world_size": local_world_size}
    store.set(f"{_ROLE_INFO}{group_rank}", json.dumps(mine))
    if group_rank == 0:
        infos = [
            json.loads(each) for each in store.multi_get([f"{_ROLE_INFO}{rank}" for rank in range(group_world_size)])
        ]
        assigned = assign_worker_ranks([(str(info["role"]), int(info["local_world_size"])) for info in infos])
        before_answering()
        store.multi_set(
            [f"{_ASSIGNED}{rank}" for rank in range(group_world_size)],
            [
                json.dumps([each.base_rank, each.world_size, each.base_role_rank, each.role_world_size])
                for each in assigned
            ],
        )
    base_rank, world_size, base_role_rank, role_world_size = json.loads(store.get(f"{_ASSIGNED}{group_rank}"))
    return NodeRanks(int(base_rank), int(world_size), int(base_role_rank), int(role_world_size))


def exit_barrier(store: Store, group_world_size: int, timeout: float) -> None:
    """Wait until all nodes have arrived here, or raise StoreTimeoutError after this many seconds."""
    if store.add(f"{_TERMINAL}/num_members", 1) == group_world_size:
        store.set(f"{_TERMINAL}/last_member", "<val_ignored>")
    store.wait([f"{_TERMINAL}/last_member"], timedelta(seconds=timeout))


def wait_at_exit_barrier(store: Store | None, group_world_size: int | None, timeout: float) -> None:
    """`exit_barrier` after success: a barrier that fails does not turn that into failure; it is logged."""
    if store is None or group_world_size is None:
        return
    try:
        exit_barrier(store, group_world_size, timeout)
    except Exception:
        log.exception("the other agents did not come to the exit barrier; this node's workers had all succeeded")
