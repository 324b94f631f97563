"""Hosts as users write them: on the command line and in host files of DeepSpeed and of MPI. Pure.

    host                      as many workers as the command says
    host slots=8              a host file of DeepSpeed or Open MPI; also max_slots=N, and port=N for ssh's port
    host:8                    the same on the command line and in a host file of MPICH
    user@host, [fd00::1]:8    another user; IPv6 addresses stand in brackets where something follows them
    node[01-16]:8             the hosts of a list as Slurm writes them, with 8 slots each

Laws:

1. A number after a colon is a number of slots, as for MPI and DeepSpeed, and never a port.
2. No name can be an option of ssh's: it begins with a letter, a digit or an underscore.
3. What is not a list of hosts is refused in one sentence, which names the source and the line.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rallypoint.base.errors import UsageError
from rallypoint.base.log import printable
from rallypoint.cluster.hostlist import HostlistError, expand

MOST_HOSTS = 16_384
MOST_SLOTS = 1024
_NAME = re.compile(r"(?=.{1,253}\Z)\w[\w-]{0,62}(\.[\w-]{1,63})*\.?", re.ASCII)
_USER = re.compile(r"[\w.\\][\w.@+\\-]{0,63}\$?", re.ASCII)
_COMMA = re.compile(r",(?![^\[\]]*\])")
"""One outside of brackets."""
_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
_SLOT_KEYS = ("slots",)
_BOUND_KEYS = ("max_slots", "max-slots", "slots_max")


class Host(NamedTuple):
    """A machine that ssh reaches.

    `slots` is the number of workers there, None where none was given; `devices` are the slots that were picked, None
    for all of them; `user` and `port` are empty and 0 where ssh itself knows.
    """

    name: str
    slots: int | None = None
    user: str = ""
    port: int = 0
    devices: tuple[int, ...] | None = None

    @property
    def target(self) -> str:
        """The destination for ssh."""
        return f"{self.user}@{self.name}" if self.user else self.name

    @property
    def workers(self) -> int | None:
        """How many workers run there; None where the command says."""
        return self.slots if self.devices is None else len(self.devices)


def parse_hosts(text: str, source: str = "--hosts") -> list[Host]:
    """Read a list with commas.

    Args:
        text: such as `node1:8,user@node2`.
        source: where it was given, for messages.

    Raises:
        UsageError: one of them is no host, or is there twice.
    """
    words = [word.strip() for word in _COMMA.split(text)]
    if words == [""]:
        raise UsageError(f"{source} names no host; give it as a list: node1:8,node2:8")
    return _all(host for word in words for host in _read_hosts(word, f"{source}={printable(text)!r}"))


def parse_hostfile(data: bytes, source: str) -> list[Host]:
    """Read a host file: a host on each line, `#` begins a comment.

    Args:
        data: what the file holds.
        source: its name, for messages.

    Raises:
        UsageError: see `parse_hosts`.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise UsageError(f"{source} is not text; name a file with one host on each line") from None
    lines = ((number, line.partition("#")[0].split()) for number, line in enumerate(text.splitlines(), 1))
    hosts = _all(host for number, words in lines if words for host in _read_line(words, f"{source}, line {number}"))
    if not hosts:
        raise UsageError(f"{source} names no host; write one on each line: node1 slots=8")
    return hosts


def _all(found: Iterable[Host]) -> list[Host]:
    """The hosts, each once."""
    hosts: list[Host] = []
    seen: set[tuple[str, str, int]] = set()
    for host in found:
        key = (host.name, host.user, host.port)
        if key in seen:
            raise UsageError(f"the host {host.target} is named twice; give each once, with all its slots")
        if len(hosts) == MOST_HOSTS:
            raise UsageError(f"more than {MOST_HOSTS} hosts are named; give fewer")
        seen.add(key)
        hosts.append(host)
    return hosts


def _read_line(words: list[str], source: str) -> Iterator[Host]:
    for host in _read_hosts(words[0], source):
        yield _with_keys(host, words[1:], source)


def _with_keys(host: Host, words: list[str], source: str) -> Host:
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in {*_SLOT_KEYS, *_BOUND_KEYS, "port"}:
            raise UsageError(
                f"{source}: {printable(word)!r} is not understood; after the host come slots=N, max_slots=N, port=N"
            )
        if key == "port":
            host = host._replace(port=_number(value, source, "port", 65535))
            continue
        count = _number(value, source, "number of slots", MOST_SLOTS)
        if key in _SLOT_KEYS:
            if host.slots is not None:
                raise UsageError(f"{source}: {host.name} is given its slots twice; give them once")
            host = host._replace(slots=count)
        elif host.slots is not None and count < host.slots:
            raise UsageError(f"{source}: {host.name} has slots={host.slots} and {word}; give no more slots than that")
    return host


def _read_hosts(word: str, source: str) -> Iterator[Host]:
    """Read one host, or several in brackets."""
    if "[" not in word.rpartition("@")[2][1:]:  # a bracket at the beginning is that of an IPv6 address
        yield _read_host(word, source)
        return
    try:
        found = expand(word)
    except HostlistError as error:
        raise UsageError(f"{source}: {printable(word)!r} is not a list of hosts: {error}; write node[1-8]:4") from None
    for each in found:
        yield _read_host(each, source)


def _read_host(word: str, source: str) -> Host:
    """Read `[user@]host[:slots]`."""
    user, at, place = word.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise UsageError(f"{source}: {printable(user)!r} is not a user's name; write it as user@host")
    name, slots = split_place(place, source)
    return Host(name, None if slots is None else _number(slots, source, "number of slots", MOST_SLOTS), user)


def split_place(text: str, source: str) -> tuple[str, str | None]:
    """A host's name or address, without brackets, and what stands behind its colon, None where there is none.

    Raises:
        UsageError: it is neither.
    """
    if text.startswith("["):
        name, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")) or not _is_ipv6(name):
            raise UsageError(
                f"{source}: {printable(text)!r} is not an IPv6 address in brackets; write it as [fd00::1]:8, where 8 "
                "is the number of slots (a port of ssh's goes into a host file: port=N)"
            )
        return name, rest[1:] if rest else None
    if text.count(":") > 1:
        if not _is_ipv6(text):
            raise UsageError(f"{source}: {printable(text)!r} is not a host; write it as node1:8, or [fd00::1]:8")
        return text, None
    name, colon, rest = text.partition(":")
    if not _NAME.fullmatch(name):
        raise UsageError(f"{source}: {printable(name)!r} is not a host's name or address; write it as node1 or node1:8")
    return name, rest if colon else None


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _number(text: str, source: str, what: str, most: int) -> int:
    if not _NUMBER.fullmatch(text) or not 1 <= int(text) <= most:
        port = "; a port of ssh's goes into a host file: port=N" if most == MOST_SLOTS and text.isdecimal() else ""
        raise UsageError(f"{source}: {printable(text)!r} is not a {what}; give a number from 1 to {most}{port}")
    return int(text)


def labels(hosts: Iterable[Host]) -> Iterator[str]:
    """What each host is called in output: its name, and as much more as tells it from others of that name."""
    known = list(hosts)
    names = Counter(host.name for host in known)
    for host in known:
        if names[host.name] == 1:
            yield host.name
        else:
            yield host.target + (f":{host.port}" if host.port else "")
