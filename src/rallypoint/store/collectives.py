"""Collectives of workers over a store (contract section 8).

The keys are torch's, so that our callers and torch's can share a store; torch's own stores work too. Unlike in torch,
the store's timeout is unchanged afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from rallypoint.base.clock import Deadline
from rallypoint.store.api import Store

_SET = "<val_ignored>"
_NUM_MEMBERS, _LAST_MEMBER = "/num_members", "/last_member"
_TRACE, _TRACING_GATE = "/TRACE", "/TRACING_GATE"

_MAX_NAMED = 16
"""Maximum number of missing ranks that an error names."""


@contextmanager
def store_timeout(store: Store, timeout: float) -> Iterator[None]:
    """Set a store's timeout inside the `with`, and restore it afterwards."""
    before = store.timeout
    store.set_timeout(timedelta(seconds=timeout))
    try:
        yield
    finally:
        store.set_timeout(before)


def get_all(store: Store, rank: int, prefix: str, world_size: int) -> list[bytes]:
    """Return the values of `<prefix>0` to `<prefix><world_size - 1>`; wait until all exist.

    Rank 0 returns last, after all others have read, so its process can serve the store.

    Raises:
        StoreTimeoutError: some rank did not arrive or read within the store's timeout.
    """
    values = [bytes(value) for value in store.multi_get([f"{prefix}{rank}" for rank in range(world_size)])]
    last = _count_in(store, world_size, f"{prefix}/finished")
    if rank == 0:
        store.get(last)
    return values


def synchronize(
    store: Store, data: str | bytes, rank: int, world_size: int, key_prefix: str, timeout: float = 300
) -> list[bytes]:
    """Share `data` with all others, and return everybody's data by rank; use a new `key_prefix` each time. Raises
    StoreTimeoutError if not all arrive within `timeout` seconds."""
    with store_timeout(store, timeout):
        store.set(f"{key_prefix}{rank}", data)
        return get_all(store, rank, key_prefix, world_size)


def barrier(
    store: Store,
    world_size: int,
    key_prefix: str,
    barrier_timeout: float = 300,
    rank: int | None = None,
    rank_tracing_decoder: Callable[[int], str] | None = None,
    trace_timeout: float = 10,
) -> None:
    """Wait until all arrive; use a new `key_prefix` for each barrier.

    If all pass their `rank`, the error on rank 0 names the missing ranks, in the words of `rank_tracing_decoder`;
    finding them can take another `trace_timeout` seconds.

    Raises:
        StoreTimeoutError: some rank did not arrive within `barrier_timeout` seconds.
    """
    last = _count_in(store, world_size, key_prefix)
    try:
        store.wait([last], timedelta(seconds=barrier_timeout))
    except RuntimeError as error:  # torch's stores have their own errors
        missing = [] if rank is None else _trace_missing(store, rank, world_size, key_prefix, trace_timeout)
        if not missing:
            raise
        names = ", ".join(map(rank_tracing_decoder or str, missing))
        raise type(error)(
            f"Timed out waiting on barrier on rank {rank}, for key prefix: {key_prefix} "
            f"(world_size={world_size}, missing_ranks=[{names}], timeout={barrier_timeout})"
        ) from None


def _count_in(store: Store, world_size: int, key_prefix: str) -> str:
    """Count this caller; return the key that exists once all arrive."""
    last = key_prefix + _LAST_MEMBER
    if store.add(key_prefix + _NUM_MEMBERS, 1) == world_size:
        store.set(last, _SET)
    return last


def _trace_missing(store: Store, rank: int, world_size: int, key_prefix: str, timeout: float) -> list[int]:
    """On rank 0, find the first ranks missing at a barrier; other ranks report their arrival and wait for rank 0.

    Empty if the store does not answer.
    """
    deadline = Deadline.after(timeout)
    gate = key_prefix + _TRACING_GATE
    missing: list[int] = []
    with suppress(RuntimeError):
        store.set(f"{key_prefix}{rank}{_TRACE}", _SET)
        if rank != 0:
            store.wait([gate], timedelta(seconds=deadline.remaining()))
            return []
        traces = {peer: f"{key_prefix}{peer}{_TRACE}" for peer in range(1, world_size)}
        with suppress(RuntimeError):
            store.wait(list(traces.values()), timedelta(seconds=deadline.remaining()))
        for peer, trace in traces.items():
            if len(missing) < _MAX_NAMED and not store.check([trace]):
                missing.append(peer)
        store.set(gate, _SET)
    return missing
