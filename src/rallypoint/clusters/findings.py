"""What a cluster's environment tells about a job, and checks of its values. Pure.

The whole environment is untrusted text: numbers are checked for their range, names for their characters and length.
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
"""The highest job number of a batch system."""
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?", re.ASCII)
_IPV6 = re.compile(r"[0-9A-Fa-f]{0,4}(:[0-9A-Fa-f]{0,4}){2,7}", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,10}", re.ASCII)
_NAME = re.compile(r"[\w.@:-]{1,120}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts about a node that are not in its environment.

    `hostname` is the kernel's; `hosts_file` is the text of /etc/hosts; `ephemeral` that of the kernel's port range for
    outgoing connections; `cpu_quota` that of the control group's `cpu.max`; `job_file` that of the file in which the
    cluster describes the job (`detect.job_file`). Each is empty if unknown.
    """

    hostname: str = ""
    hosts_file: str = ""
    ephemeral: str = ""
    cpu_quota: str = ""
    job_file: str = ""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A job that a cluster started on all its nodes, and this node's place in it.

    `title` is the job's name in messages. `nodes` is None if only the user can know it. `index` is this node's, from
    0. `host` and `port` are node 0's; `host` is empty if the environment does not say. `hosts_here`: this node is known
    to be node 0, whatever its name stands for. `gpus` and `cpus` are the numbers that the task on this node may use,
    None if the environment does not say. `wanted` maps an unknown value to the sentence that asks for it; `origins`
    maps a value to its source. `remark` is for the user, unless empty. So is `unbind`, if the task is bound to few
    processors.
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
    """The environment does not suffice to identify the job; the sentence says why, and what to type."""

    sentence: str


@dataclass(frozen=True)
class NoCluster:
    """No cluster started this process. `fact` says how we know, `remedy` what to do if one should have."""

    fact: str
    remedy: str

    @property
    def sentence(self) -> str:
        return f"{self.fact}; {self.remedy}"


Finding = Cluster | DetectionRefusal | NoCluster


def number(environ: Mapping[str, str], name: str, least: int, most: int) -> int | None:
    """Read a number; None if unset or empty. Raises UsageError if it is not a number or out of range."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not _NUMBER.fullmatch(text) or not least <= int(text) <= most:
        raise UsageError(
            f"{name}={text[:60]!r} is not a number from {least} to {most}, so no cluster can have set it; unset it, "
            "or remove --cluster"
        )
    return int(text)


def is_host_name(text: str) -> bool:
    """Whether a text can be a host's name or IPv4 address."""
    return _HOST.fullmatch(text) is not None and all(0 < len(label) < 64 for label in text.split("."))


def is_host(text: str) -> bool:
    """Whether a text can be a host's name or address, including IPv6 without brackets."""
    return is_host_name(text) or _IPV6.fullmatch(text) is not None


def name_of_job(environ: Mapping[str, str], *names: str) -> str:
    """The first of these variables that is valid as a job's name; empty if none is."""
    return next((text for name in names if _NAME.fullmatch(text := environ.get(name, ""))), "")


def usable(hosts: Iterable[str]) -> list[str]:
    """The hosts in order, without duplicates; empty if there are too many or one is invalid."""
    named = list(dict.fromkeys(hosts))
    return named if len(named) <= MAX_NODES and all(map(is_host, named)) else []


def place_of(hostname: str, hosts: Sequence[str]) -> int | None:
    """This host's position in a list whose names may be longer or shorter than its own; None if ambiguous."""
    if hostname in hosts:
        return hosts.index(hostname)
    label, labels = hostname.partition(".")[0], [host.partition(".")[0] for host in hosts]
    return labels.index(label) if labels.count(label) == 1 else None
