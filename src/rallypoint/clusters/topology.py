"""The domain of this node: the machines whose GPUs are better connected to this node's than other machines' are.

The GPUs' driver takes precedence over a scheduler, since an NVLink domain is the reason to keep ranks together.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from rallypoint.base.errors import UsageError
from rallypoint.base.log import get_logger
from rallypoint.base.nvml import LIBRARY, nvml_fabrics
from rallypoint.control.membership.segments import checked_size

_log = get_logger(__name__)

_MOST = 255
_ADDRESS, _PATTERN = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"


class Domain(NamedTuple):
    """A domain, and where its name comes from, for messages."""

    name: str
    source: str


def check_topology(domain: str, segment: int, min_nodes: int) -> None:
    """Raise UsageError if the domain is invalid, or if a job of this size cannot have such segments."""
    if not _is_name(domain):
        raise UsageError(
            f"--node-domain={domain[:80]!r} is not a valid name; use at most {_MOST} bytes of printable characters, "
            "without spaces around them"
        )
    checked_size(segment, min_nodes, fixed_ranks=False)


def node_domain(option: str) -> str:
    """The name of this node's domain: `option` or, for `auto`, the one found, which is logged; empty if unknown."""
    if option != "auto":
        return option
    domain = find_domain(os.environ)
    if domain is None:
        _log.warning(
            "--node-domain=auto: neither NVML nor %s reports this node's domain, so the node counts as having none; "
            "set --node-domain=NAME, or PET_NODE_DOMAIN",
            _ADDRESS,
        )
        return ""
    _log.info("this node is in domain %s, as reported by %s", domain.name, domain.source)
    return domain.name


def find_domain(environ: Mapping[str, str], library: str = LIBRARY) -> Domain | None:
    """Find this node's domain with NVML (the library's name or path) or Slurm's variables; None if unknown."""
    fabrics = nvml_fabrics(library)
    if len(set(fabrics)) == 1 and fabrics[0]:
        return Domain(fabrics[0], "NVML")
    name = slurm_domain(environ.get(_ADDRESS, ""), environ.get(_PATTERN, ""))
    return Domain(name, _ADDRESS) if name else None


def slurm_domain(address: str, pattern: str) -> str:
    """The block or lowest switch in `root.leaf-3.node7`, whose pattern is `switch.switch.node`; empty if none.

    The node's name at the end may also contain periods.
    """
    *kinds, last = pattern.split(".")
    *names, _node = address.split(".", len(kinds))
    name = names[-1] if kinds and last == "node" and len(names) == len(kinds) else ""
    return name if _is_name(name) else ""


def _is_name(text: str) -> bool:
    return text == text.strip() and text.isprintable() and len(text.encode(errors="replace")) <= _MOST
