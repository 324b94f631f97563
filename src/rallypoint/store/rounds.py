"""One port, and behind it a new table for each round: for servers that hand connections over by their first bytes.

A round's keys cannot be read in the next, although workers find both at the same address. Everything but the methods
that say otherwise runs on the loop's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rallypoint.base.loop import LoopThread, shared_loop

if TYPE_CHECKING:
    import asyncio

    from rallypoint.store.connection import ServedTable


class RoundTables:
    """The table of the present round and the connections to it."""

    def __init__(self, loop: LoopThread | None = None) -> None:
        self._loop = loop or shared_loop()
        self._served: ServedTable | None = None
        self._former: list[ServedTable] = []

    def connection(self) -> asyncio.Protocol:
        """The protocol of a new connection. On the loop's thread."""
        from rallypoint.store.connection import ServedTable, StoreProtocol

        if self._served is None:
            self._served = ServedTable()
        return StoreProtocol(self._served)

    def next_round(self) -> None:
        """From now on new connections get a new, empty table; old ones keep theirs. On any thread."""
        self._loop.call(self._renew)

    def end_former(self) -> None:
        """End the connections to the tables of earlier rounds. On any thread."""
        self._loop.call(self._end_former)

    def close(self) -> None:
        """End all connections. On any thread but the loop's. Idempotent."""
        self._loop.submit(self._end()).result()

    def _renew(self) -> None:
        if self._served is not None:
            self._former.append(self._served)
            self._served = None

    def _end_former(self) -> None:
        former, self._former = self._former, []
        for served in former:
            served.close()

    async def _end(self) -> None:
        import asyncio

        self._renew()
        self._end_former()
        await asyncio.sleep(0)
