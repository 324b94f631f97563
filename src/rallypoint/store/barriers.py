"""The barrier of stores that have none of their own: its members are counted, and the last one opens it."""

from __future__ import annotations

from rallypoint.store.api import Store
from rallypoint.store.errors import StoreTimeoutError


def wait_at_barrier(store: Store, key: str, world_size: int, seconds: float, where: str) -> None:
    """See `Store.barrier`.

    Args:
        store: in which the members are counted, by torch's names for the keys.
        key: of the barrier.
        world_size: how many open it.
        seconds: how long to wait.
        where: the store, as a person knows it.

    Raises:
        StoreTimeoutError: they did not come in time.
    """
    opened = f"{key}/last_member"
    if store.add(f"{key}/num_members", 1) >= world_size:
        store.set(opened, b"1")
    try:
        store.wait([opened], seconds)
    except StoreTimeoutError:
        raise StoreTimeoutError(
            f"not all of {world_size} came to the barrier {key!r} within {seconds:g} s in {where}; "
            "see which of them is missing, or wait longer"
        ) from None
