"""Selects hosts of a list, and slots of them: DeepSpeed's `--include` and `--exclude`. Pure.

worker-0@worker-1:0,2     all of worker-0, and two slots of worker-1
"""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.base.errors import UsageError
from rallypoint.base.log import printable
from rallypoint.remote.hosts import MOST_SLOTS, Host, split_place

_SELECTION = dict[str, tuple[int, ...] | None]
"""The slots of each host that is named; None for all."""


def include(hosts: Sequence[Host], text: str) -> list[Host]:
    """Only what is named, in the order of the list.

    Raises:
        UsageError: a host or slot that there is not.
    """
    named = _read(hosts, text, "--include")
    return [host._replace(devices=named[host.name]) for host in hosts if host.name in named]


def exclude(hosts: Sequence[Host], text: str) -> list[Host]:
    """All but what is named.

    Raises:
        UsageError: a host or slot that there is not, or nothing is left.
    """
    named = _read(hosts, text, "--exclude")
    left: list[Host] = []
    for host in hosts:
        slots = named.get(host.name, ())
        if slots == ():
            left.append(host)
        elif slots is not None:
            kept = tuple(slot for slot in range(host.slots or 0) if slot not in slots)
            left += [host._replace(devices=kept)] if kept else []
    if not left:
        raise UsageError(f"--exclude={printable(text)!r} leaves no host; exclude fewer")
    return left


def _read(hosts: Sequence[Host], text: str, flag: str) -> _SELECTION:
    source = f"{flag}={printable(text)!r}"
    known = {host.name: host for host in hosts}
    named: _SELECTION = {}
    for word in text.split("@"):
        name, listed = split_place(word.strip(), source)
        if name not in known:
            raise UsageError(f"{source} names {name}, which is not among the hosts; give one of {_some(known)}")
        if name in named:
            raise UsageError(f"{source} names {name} twice; name it once, with all its slots: {name}:0,1")
        named[name] = None if listed is None else _slots(known[name], listed, source)
    return named


def _slots(host: Host, listed: str, source: str) -> tuple[int, ...]:
    if host.slots is None:
        raise UsageError(
            f"{source} picks slots of {host.name}, whose number of slots is not given; write it as {host.name}:8 in "
            "--hosts, or slots=8 in the host file"
        )
    found: list[int] = []
    for word in listed.split(","):
        if not (word.isascii() and word.isdecimal() and len(word) <= len(str(MOST_SLOTS)) and int(word) < host.slots):
            raise UsageError(
                f"{source}: {printable(word)!r} is not a slot of {host.name}; its slots are 0 to {host.slots - 1}"
            )
        if int(word) in found:
            raise UsageError(f"{source} names slot {word} of {host.name} twice; name it once")
        found.append(int(word))
    return tuple(found)


def _some(names: Sequence[str] | dict[str, Host]) -> str:
    shown = list(names)[:8]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
