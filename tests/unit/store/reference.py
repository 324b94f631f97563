"""The store's rules in the plainest form, and requests in which waits meet changes: what both stores are held to."""

from __future__ import annotations

from hypothesis import strategies as st

from rallypoint.store.errors import StoreProtocolError
from tests import typed_requests as wire
from tests.unit.store.requests import REQUESTS

Replies = list[tuple[str, bytes]]


class Twin:
    """The same rules in the plainest form: waiters in the order in which they came, each with what it still misses."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, list[bytes]] = {}
        self.waiters: list[tuple[str, list[bytes]]] = []

    def execute(self, client: str, request: wire.Request) -> Replies:
        """The replies of the real table, by `match`."""
        values, queues = self.values, self.queues
        match request:
            case wire.Set(key, value):
                values[key] = value
                return self.changed(key)
            case wire.MultiSet(pairs):
                return [reply for key, value in pairs for reply in self.execute(client, wire.Set(key, value))]
            case wire.Append(key, value):
                values[key] = values.get(key, b"") + value
                return self.changed(key)
            case wire.CompareSet(key, expected, desired):
                if values.get(key, b"") == expected:
                    values[key] = desired
                return [*self.changed(key), (client, wire.string(values.get(key, expected)))]
            case wire.Get(key):
                return [(client, wire.string(values.get(key, b"")))]
            case wire.MultiGet(keys):
                return [(client, wire.string(values.get(key, b""))) for key in keys]
            case wire.Add(key, delta):
                total = self.add(key, delta)
                return [*self.changed(key), (client, wire.I64.pack(total))]
            case wire.Check(keys):
                return [(client, b"\0" if all(key in values or queues.get(key) for key in keys) else b"\1")]
            case wire.Wait(keys):
                if all(key in values or queues.get(key) for key in keys):
                    return [(client, b"\0")]
                self.leave(client)
                self.waiters.append((client, [key for key in keys if key not in values]))
                return []
            case _:
                return self.execute_rest(client, request)

    def execute_rest(self, client: str, request: wire.Request) -> Replies:
        """The other half, for `execute` fits no screen."""
        values, queues = self.values, self.queues
        match request:
            case wire.NumKeys():
                return [(client, wire.I64.pack(len(values)))]
            case wire.DeleteKey(key):
                return [(client, wire.I64.pack(int(values.pop(key, None) is not None)))]
            case wire.CancelWait():
                self.leave(client)
                return [(client, b"\1")]
            case wire.Ping(nonce):
                return [(client, wire.U32.pack(nonce))]
            case wire.QueuePush(key, value):
                queues.setdefault(key, []).append(value)
                return self.pushed(key)
            case wire.QueuePop(key):
                length = wire.I64.pack(len(queues.get(key, [])))
                return [(client, length + wire.string(queues[key].pop(0)) if queues.get(key) else length)]
            case wire.QueueLen(key):
                return [(client, wire.I64.pack(len(queues.get(key, []))))]
            case wire.ListKeys():
                return [(client, wire.strings(list(values)))]
            case wire.Barrier(key, world_size):
                if self.add(key, 1) >= world_size:
                    return [*self.changed(key), (client, b"\0")]
                self.leave(client)
                self.waiters.append((client, [key]))
                return []
            case _:
                raise AssertionError(request)

    def add(self, key: bytes, delta: int) -> int:
        total = strtoll(self.values[key]) + delta if key in self.values else delta
        while total >= 1 << 63:
            total -= 1 << 64
        while total < -(1 << 63):
            total += 1 << 64
        self.values[key] = str(total).encode()
        return total

    def changed(self, key: bytes) -> Replies:
        for _, missing in self.waiters:
            missing[:] = [name for name in missing if name != key]
        woken = [client for client, missing in self.waiters if not missing]
        self.waiters = [waiter for waiter in self.waiters if waiter[1]]
        return [(client, b"\0") for client in woken]

    def pushed(self, key: bytes) -> Replies:
        for waiter in self.waiters:
            client, missing = waiter
            missing[:] = [name for name in missing if name != key]
            if not missing:
                self.waiters.remove(waiter)
                return [(client, b"\0")]
        return []

    def leave(self, client: str) -> None:
        self.waiters = [waiter for waiter in self.waiters if waiter[0] != client]


def strtoll(text: bytes) -> int:
    """C's strtoll as far as it concerns us, character by character; raises where it could not read a number."""
    rest = text.decode("latin-1").lstrip(" \t\n\v\f\r")
    sign = rest[:1] if rest[:1] in {"+", "-"} else ""
    digits = ""
    for char in rest[len(sign) :]:
        if char not in "0123456789":
            break
        digits += char
    number = int(sign + digits) if digits else 1 << 63
    if not -(1 << 63) <= number < 1 << 63:
        raise StoreProtocolError("no number")
    return number


NAMES = ["A", "B", "C"]
CLIENTS = st.sampled_from(NAMES)
STEPS = st.lists(st.tuples(CLIENTS, st.one_of(REQUESTS, st.none())), max_size=40)

FEW = st.sampled_from([b"a", b"b"])
WAITING = st.one_of(
    st.builds(wire.Wait, st.lists(FEW, max_size=3)),
    st.builds(wire.Set, FEW, st.just(b"")),
    st.builds(wire.DeleteKey, FEW),
    st.builds(wire.QueuePush, FEW, st.just(b"")),
    st.builds(wire.QueuePop, FEW),
    st.builds(wire.Barrier, FEW, st.integers(1, 3)),
    st.builds(wire.CancelWait),
    st.none(),
)
WAITING_STEPS = st.lists(st.tuples(CLIENTS, WAITING), max_size=30)
"""Clients and their requests; None is a client that leaves."""
