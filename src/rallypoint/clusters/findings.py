"""The data read from the environment of a cluster, how its variables are read, and a port for the control plane.

All of them are foreign text: numbers are checked for their range, names for their letters and length.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from rallypoint.base.errors import UsageError

MAX_NODES = 65536
MAX_CPUS = 1 << 16
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,10}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts about a node besides the environment.

    `hostname` is that of the kernel; `hosts_file` the text of /etc/hosts; `ephemeral` that of the kernel's range of
    ports for outgoing connections; `cpu_quota` that of the control group's `cpu.max`. Each is empty if unknown.
    """

    hostname: str = ""
    hosts_file: str = ""
    ephemeral: str = ""
    cpu_quota: str = ""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A job that a cluster has started on all its nodes, and this node's place in it.

    `title` names the job for people. `nodes` is None if only the user can know it. `index` is this node's, from 0.
    `host` and `port` are where node 0 can be reached; `host` is empty if the environment does not say.
    `hosts_here`: this node is known to be node 0, whatever its name
    stands for. `gpus` and `cpus` are how many of them the task on this node may use, None if the environment does not
    say. `wanted` has, for the name of a value that is not known, the sentence that asks for it; `origins`, for the name
    of a value, where it comes from. `remark` is for the user, if it is not empty, and so is `unbind`, where the task
    may run on few of the processors.
    """

    title: str
    nodes: int | None
    index: int
    host: str = ""
    port: int = 0
    job_id: str = ""
    hosts_here: bool = False
    gpus: int | None = None
    cpus: int | None = None
    wanted: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    remark: str = ""
    unbind: str = ""


@dataclass(frozen=True)
class Refusal:
    """The job cannot be told from what is there; the sentence says why, and what to type."""

    sentence: str


@dataclass(frozen=True)
class Nothing:
    """No cluster has started this process: `fact` says how that is known, `remedy` what to do if one should have."""

    fact: str
    remedy: str

    @property
    def sentence(self) -> str:
        return f"{self.fact}; {self.remedy}"


Finding = Cluster | Refusal | Nothing


def number(environ: Mapping[str, str], name: str, least: int, most: int) -> int | None:
    """A number of the environment; None if it is not set or empty.

    Raises:
        UsageError: it is no number, or out of range.
    """
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not _NUMBER.fullmatch(text) or not least <= int(text) <= most:
        raise UsageError(
            f"{name}={text[:60]!r} is not a number from {least} to {most}, as its cluster would give it; unset it, or "
            "leave --cluster out"
        )
    return int(text)


def is_host_name(text: str) -> bool:
    """Whether a text can be the name or the IPv4 address of a host."""
    return _HOST.fullmatch(text) is not None and all(0 < len(label) < 64 for label in text.split("."))


DEFAULT_RANGE = "32768 60999"
"""What `/proc/sys/net/ipv4/ip_local_port_range` says where nobody has changed it."""

_SPANS = ((10000, 32767), (61000, 65535), (5000, 9999))
"""From where ports are taken: the first of these of which the kernel's range leaves `_ENOUGH`."""
_ENOUGH = 1000
_USED_BY_OTHERS = frozenset(
    {5000, 5432, 5671, 5672, 5900, 5985, 6379, 6443, *range(6000, 6064), *range(6817, 6821), 7077, 8000, 8080, 8081}
    | {8265, 8443, 8786, 8787, 8888, 9000, 9090, 9091, 9092, 9093, 9100, 9200, 9300, 9400, 9418}
    | {*range(10248, 10260), 11211, 15672, 16686, 18080, 20048, 25672, 26379, 27017, 29400, 29500}
)
"""Ports of well-known services that machines of a cluster run, and those that launchers take where none is given."""
_STEP_STRIDE, _RESTART_STRIDE = 101, 10007
"""Jobs that follow one another have ports that do, too; steps and restarts of a job are set apart from those."""


def control_port(job: int, step: int = 0, restart: int = 0, ephemeral: str = DEFAULT_RANGE) -> tuple[int, bool]:
    """The port of a job's control plane, and whether it is outside of the kernel's range of ports (`ephemeral`, its
    text).

    It follows from the numbers of the job and of the step in it, and from how often the job was begun again.
    """
    low, high = _range_of(ephemeral)
    for first, last in _SPANS:
        usable = [port for port in range(first, last + 1) if not low <= port <= high and port not in _USED_BY_OTHERS]
        if len(usable) >= _ENOUGH:
            return usable[_number(job, step, restart) % len(usable)], True
    usable = [port for port in range(_SPANS[0][0], _SPANS[0][1] + 1) if port not in _USED_BY_OTHERS]
    return usable[_number(job, step, restart) % len(usable)], False


def _number(job: int, step: int, restart: int) -> int:
    return job + _STEP_STRIDE * step + _RESTART_STRIDE * restart


def _range_of(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"\s*([0-9]{1,5})\s+([0-9]{1,5})\s*", text, re.ASCII)
    if match is None or not int(match[1]) <= int(match[2]) <= 65535:
        return _range_of(DEFAULT_RANGE)
    return int(match[1]), int(match[2])
