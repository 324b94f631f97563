"""Parses the hosts and variables that users pass to `rallyctl launch`. Pure.

    host                      as many workers as the command says
    host:8                    with 8 slots, one worker each; in a file also `host slots=8`
    user@host, [fd00::1]:8    another user; an IPv6 address needs brackets if something follows it
    node[01-16]:8             hosts in Slurm's list format, with 8 slots each

Laws:

1. A number after a colon is a number of slots, as in MPI and DeepSpeed, never a port. Set ports in `~/.ssh/config`.
2. No name can be an option of ssh: names begin with a letter, a digit or an underscore.
3. An invalid list of hosts is refused with one sentence, which names the source and the line.
4. Only named variables of the local environment are passed on; patterns (`NCCL_*`) match variables set here.
5. `PET_*` variables tell the nodes how to meet. By rallyrun's own rules, the command's flags take precedence, and
   scripts that call rallyrun need no arguments. The user's values take precedence over those chosen here.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from rallypoint.base.errors import UsageError
from rallypoint.base.log import printable
from rallypoint.clusters.hostlist import HostlistError, expand

MOST_HOSTS = 16_384
MOST_SLOTS = 1024
_NAME = re.compile(r"(?=.{1,253}\Z)\w[\w-]{0,62}(\.[\w-]{1,63})*\.?", re.ASCII)
_USER = re.compile(r"[\w.\\][\w.@+\\-]{0,63}\$?", re.ASCII)
_COMMA = re.compile(r",(?![^\[\]]*\])")
"""A comma outside brackets."""
_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_PATTERN = re.compile(r"[A-Za-z0-9_*?]+", re.ASCII)


class Host(NamedTuple):
    """A machine that ssh can reach.

    `slots` is its number of workers, None if the command sets it; `user` is empty to let ssh choose.
    """

    name: str
    slots: int | None = None
    user: str = ""

    @property
    def target(self) -> str:
        return f"{self.user}@{self.name}" if self.user else self.name


def parse_hosts(text: str) -> list[Host]:
    """Parse the list in `--hosts`, such as `node1:8,user@node2`. Raises UsageError for an invalid or duplicate host."""
    words = [word.strip() for word in _COMMA.split(text)]
    if words == [""]:
        raise UsageError("--hosts does not list any hosts; write a list such as node1:8,node2:8")
    return _unique_hosts(host for word in words for host in _read_hosts(word, f"--hosts={printable(text)!r}"))


def parse_hostfile(data: bytes, source: str) -> list[Host]:
    """Parse a host file: one host per line, `#` starts a comment. Raises UsageError like `parse_hosts`."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise UsageError(f"{source} is not text; use a file with one host per line") from None
    lines = ((number, line.partition("#")[0].split()) for number, line in enumerate(text.splitlines(), 1))
    hosts = _unique_hosts(
        host for number, words in lines if words for host in _read_line(words, f"{source}, line {number}")
    )
    if not hosts:
        raise UsageError(f"{source} does not list any hosts; write one per line, such as node1 slots=8")
    return hosts


def _unique_hosts(parsed: Iterable[Host]) -> list[Host]:
    hosts: list[Host] = []
    seen: set[str] = set()
    for host in parsed:
        if host.target in seen:
            raise UsageError(f"the host {host.target} is listed twice; list each host once, with all its slots")
        if len(hosts) == MOST_HOSTS:
            raise UsageError(f"more than {MOST_HOSTS} hosts are listed; list fewer")
        seen.add(host.target)
        hosts.append(host)
    return hosts


def _read_line(words: list[str], source: str) -> Iterator[Host]:
    slots = [_slots_of(word, source) for word in words[1:]]
    for host in _read_hosts(words[0], source):
        if len(slots) + (host.slots is not None) > 1:
            raise UsageError(f"{source}: the slots of {host.name} are set twice; set them once")
        yield host._replace(slots=slots[0]) if slots else host


def _slots_of(word: str, source: str) -> int:
    key, _, value = word.partition("=")
    if key != "slots":
        raise UsageError(f"{source}: {printable(word)!r} is not slots=N; write only slots=N after the host")
    return _slots(value, source)


def _read_hosts(word: str, source: str) -> Iterator[Host]:
    if "[" not in word.rpartition("@")[2][1:]:  # a leading bracket belongs to an IPv6 address
        yield _read_host(word, source)
        return
    try:
        hosts = expand(word)
    except HostlistError as error:
        raise UsageError(
            f"{source}: {printable(word)!r} is not a valid list of hosts: {error}; write node[1-8]:4"
        ) from None
    for host in hosts:
        yield _read_host(host, source)


def _read_host(word: str, source: str) -> Host:
    user, at, place = word.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise UsageError(f"{source}: {printable(user)!r} is not a valid user name; write user@host")
    name, slots = _split_place(place, source)
    return Host(name, None if slots is None else _slots(slots, source), user)


def _split_place(text: str, source: str) -> tuple[str, str | None]:
    """Split into the host's name or address without brackets, and the text after its colon, or None."""
    if text.startswith("["):
        name, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")) or not _is_ipv6(name):
            raise UsageError(
                f"{source}: {printable(text)!r} is not an IPv6 address in brackets; write it as [fd00::1]:8, where 8 "
                "is the number of slots (ssh's port goes into ~/.ssh/config)"
            )
        return name, rest[1:] if rest else None
    if text.count(":") > 1:
        if not _is_ipv6(text):
            raise UsageError(f"{source}: {printable(text)!r} is not a valid host; write it as node1:8, or [fd00::1]:8")
        return text, None
    name, colon, rest = text.partition(":")
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{source}: {printable(name)!r} is not a valid host name or address; write it as node1 or node1:8"
        )
    return name, rest if colon else None


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _slots(text: str, source: str) -> int:
    if not _NUMBER.fullmatch(text) or not 1 <= int(text) <= MOST_SLOTS:
        port = "; ssh's port goes into ~/.ssh/config" if text.isdecimal() else ""
        raise UsageError(f"{source}: {printable(text)!r} is not a number of slots; use 1 to {MOST_SLOTS}{port}")
    return int(text)


def labels(hosts: Iterable[Host]) -> Iterator[str]:
    known = list(hosts)
    names = Counter(host.name for host in known)
    for host in known:
        yield host.name if names[host.name] == 1 else host.target


# Variables for the command on each host


def named_variables(words: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that `--env` selects with `NAME`, `NAME=VALUE` or a pattern. Raises UsageError if a name is
    invalid or not set here.
    """
    variables: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals:
            variables[_checked(name, "--env")] = value
        elif {"*", "?"} & set(word) and _PATTERN.fullmatch(word):
            variables |= {variable: text for variable, text in environ.items() if fnmatchcase(variable, word)}
        elif _checked(name, "--env") in environ:
            variables[name] = environ[name]
        else:
            raise UsageError(f"--env={name}: this variable is not set here; set it, or write its value as {name}=VALUE")
    return variables


def file_variables(data: bytes, source: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Parse a file of `NAME=VALUE` lines like `docker run --env-file`: `#` starts a comment line, values are literal,
    and a name alone takes its value, if any, from here.

    Raises:
        UsageError: a line is invalid.
    """
    variables: dict[str, str] = {}
    for number, raw in enumerate(data.decode("utf-8", "surrogateescape").split("\n"), 1):
        line = raw.removesuffix("\r")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if "\0" in line:
            raise UsageError(f"{source}, line {number}: a variable cannot contain a NUL byte; remove it")
        name, equals, value = line.partition("=")
        name = _checked(name.strip(), f"{source}, line {number}")
        if equals:
            variables[name] = value
        elif name in environ:
            variables[name] = environ[name]
    return variables


def _checked(name: str, source: str) -> str:
    if not _VARIABLE.fullmatch(name):
        raise UsageError(f"{source}: {printable(name)!r} is not a valid variable name; write NAME=VALUE")
    return name


def node_variables(hosts: Sequence[Host], rank: int, endpoint: str, run_id: str) -> dict[str, str]:
    """Variables with which the node with this rank meets the others; the control plane is at `endpoint`."""
    variables = {
        "PET_NNODES": str(len(hosts)),
        "PET_NODE_RANK": str(rank),
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": endpoint,
        "PET_RDZV_ID": run_id,
    }
    slots = hosts[rank].slots
    return variables if slots is None else {**variables, "PET_NPROC_PER_NODE": str(slots)}
