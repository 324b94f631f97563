"""The data read from the environment of a cluster, and how its variables are read.

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
        """Both."""
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
