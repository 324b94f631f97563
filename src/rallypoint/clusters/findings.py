"""What the environment of a cluster says of a job, and how its values are checked. Pure.

All of the environment is foreign text: numbers are checked for their range, names for their letters and length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rallypoint.base.errors import UsageError
from rallypoint.control.protocol.ranges import MAX_NODES

MAX_CPUS = 1 << 16
MAX_GPUS = 1024
MAX_ID = 0xFFFFFFFF
"""The largest number that a batch system gives a job."""
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?", re.ASCII)
_IPV6 = re.compile(r"[0-9A-Fa-f]{0,4}(:[0-9A-Fa-f]{0,4}){2,7}", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,10}", re.ASCII)
_NAME = re.compile(r"[\w.@:-]{1,120}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts about a node besides the environment.

    `hostname` is that of the kernel; `hosts_file` the text of /etc/hosts; `ephemeral` that of the kernel's range of
    ports for outgoing connections; `cpu_quota` that of the control group's `cpu.max`; `job_file` that of the file in
    which the cluster describes the job (`detect.job_file`). Each is empty if unknown.
    """

    hostname: str = ""
    hosts_file: str = ""
    ephemeral: str = ""
    cpu_quota: str = ""
    job_file: str = ""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A job that a cluster has started on all its nodes, and this node's place in it.

    `title` names the job for people. `nodes` is None if only the user can know it. `index` is this node's, from 0.
    `host` and `port` are where node 0 can be reached; `host` is empty if the environment does not say. `hosts_here`:
    this node is known to be node 0, whatever its name stands for. `gpus` and `cpus` are how many of them the task on
    this node may use, None if the environment does not say. `wanted` has, for the name of a value that is not known,
    the sentence that asks for it; `origins`, for the name of a value, where it comes from. `remark` is for the user, if
    it is not empty, and so is `unbind`, where the task may run on few of the processors.
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
class DetectionRefusal:
    """The job cannot be told from what is there; the sentence says why, and what to type."""

    sentence: str


@dataclass(frozen=True)
class NoCluster:
    """No cluster has started this process: `fact` says how that is known, `remedy` what to do if one should have."""

    fact: str
    remedy: str

    @property
    def sentence(self) -> str:
        return f"{self.fact}; {self.remedy}"


Finding = Cluster | DetectionRefusal | NoCluster


def number(environ: Mapping[str, str], name: str, least: int, most: int) -> int | None:
    """A number of the environment; None if not set or empty. Raises UsageError: it is none, or out of range."""
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


def is_host(text: str) -> bool:
    """Whether a text can be the name or an address of a host, also of IPv6 without brackets."""
    return is_host_name(text) or _IPV6.fullmatch(text) is not None


def name_of_job(environ: Mapping[str, str], *names: str) -> str:
    """The first of these variables that can be a job's name; empty if none can."""
    return next((text for name in names if _NAME.fullmatch(text := environ.get(name, ""))), "")


def usable(hosts: Iterable[str]) -> list[str]:
    """Each host once, in the order of the first mention; empty if there are too many, or one that can be none."""
    named = list(dict.fromkeys(hosts))
    return named if len(named) <= MAX_NODES and all(map(is_host, named)) else []


def place_of(hostname: str, hosts: Sequence[str]) -> int | None:
    """Where this host is in a list whose names may be longer or shorter than its own; None if that is not clear."""
    if hostname in hosts:
        return hosts.index(hostname)
    label, labels = hostname.partition(".")[0], [host.partition(".")[0] for host in hosts]
    return labels.index(label) if labels.count(label) == 1 else None
