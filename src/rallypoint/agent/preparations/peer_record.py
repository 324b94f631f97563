"""The record that a node shares with the other nodes of a round, and its encoding. Pure."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from typing import NamedTuple

from rallypoint.base.endpoint import parse_endpoint
from rallypoint.base.errors import UserError
from rallypoint.base.log import printable

_MAX_RECORD = 64 * 1024
_MAX_NAME = 255
_MAX_USES = 16
_USE = re.compile(r"[a-z][a-z0-9-]{0,31}")


class PeerRecord(NamedTuple):
    """The record that a node shares with the others.

    `address` is the address at which others reach it, `ports` are those that it has reserved there for this round, by
    use. `base_rank` and `local_world_size` say which global ranks are there.
    """

    group_rank: int
    node: str
    address: str
    base_rank: int
    local_world_size: int
    ports: Mapping[str, tuple[int, ...]] = {}


def encode_record(record: PeerRecord) -> bytes:
    """The stored form of a record."""
    return json.dumps([*record[:-1], dict(record.ports)]).encode()


def decode_record(data: bytes, group_rank: int, world_size: int) -> PeerRecord:
    """The record that another node has written.

    Args:
        data: the value.
        group_rank: the group rank of the node under whose key it was.
        world_size: the number of workers of the round.

    Raises:
        ValueError: it is not a record, or has invalid values; the text is a sentence.
    """
    try:
        if len(data) > _MAX_RECORD:
            raise ValueError(f"it has {len(data)} bytes")
        rank, node, address, base_rank, local_world_size, ports = json.loads(data)
        first = _number(base_rank, 0, world_size - 1, "base rank")
        return PeerRecord(
            _number(rank, group_rank, group_rank, "group rank"),
            _node(node),
            _address(address),
            first,
            _number(local_world_size, 1, world_size - first, "number of workers"),
            _ports(ports),
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"the record of group rank {group_rank} cannot be used ({printable(str(error))}); "
            "see whether all nodes run the same version, and whether something else writes to the store"
        ) from None


def _node(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME or not value.isprintable():
        raise ValueError(f"it has the node name {value!r}")
    return value


def _address(value: object) -> str:
    """A host name or numeric address."""
    if not isinstance(value, str) or len(value) > _MAX_NAME or not value:
        raise ValueError(f"it has the address {value!r}")
    try:
        if ":" in value:
            socket.inet_pton(socket.AF_INET6, value)
        elif parse_endpoint(value, 1).host != value:
            raise ValueError
    except (OSError, ValueError, UserError):
        raise ValueError(f"it has the address {value!r}") from None
    return value


def _ports(value: object) -> Mapping[str, tuple[int, ...]]:
    if not isinstance(value, dict) or len(value) > _MAX_USES:
        raise ValueError("it has no ports by use")
    found = {}
    for use, ports in value.items():
        if not _USE.fullmatch(use) or not isinstance(ports, list):
            raise ValueError(f"it has ports for {use!r}")
        found[use] = tuple(_number(port, 1, 65535, "port") for port in ports)
    return found


def _number(value: object, least: int, most: int, what: str) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"it has the {what} {value!r}, where {least} to {most} can be")
    return value
