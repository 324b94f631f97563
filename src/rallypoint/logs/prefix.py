"""Prefixes of lines on the console: those of workers (contract section 6.5), and the host's name.

Where lines of several hosts are merged, as under `srun`, each begins with `<host>: `, the form of `pdsh` that `dshbak`
parses.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

DEFAULT_TEMPLATE = "[${role_name}${local_rank}]:"
TEMPLATE_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
"""The environment variable that replaces the default template."""


def line_prefixes(template: str | None, role_name: str, ranks: Mapping[int, int], attempt: int = 0) -> dict[int, str]:
    """The prefix of each local rank.

    Args:
        template: `${role_name}`, `${rank}` and `${local_rank}` are replaced, and beyond torch `${host}` (this node's
            name) and `${attempt}`; other names stay. None and empty mean the default, `[<role><local rank>]:`.
        role_name: the role of these workers.
        ranks: local rank to global rank.
        attempt: restarts used, as in the name of the log folder `attempt_<n>`.
    """
    from string import Template

    pattern = Template(template or DEFAULT_TEMPLATE)
    common = {"role_name": role_name, "host": os.uname().nodename, "attempt": attempt}
    return {
        local_rank: pattern.safe_substitute(common, rank=rank, local_rank=local_rank)
        for local_rank, rank in ranks.items()
    }


def host_label(when: str, environ: Mapping[str, str]) -> str:
    """This host's name as a prefix; empty for `never`, and for `auto` unless `srun` merges several nodes' lines."""
    return f"{os.uname().nodename}: " if when == "always" or (when == "auto" and _merged_by_srun(environ)) else ""


def with_host(template: str | None, label: str) -> str | None:
    """The template of the prefix behind the host's label, unless it has the host itself."""
    if not label or "host}" in (template or ""):
        return template
    return label.replace("$", "$$") + (template or DEFAULT_TEMPLATE)


def _merged_by_srun(environ: Mapping[str, str]) -> bool:
    """Whether `srun` has started this process on several nodes: it merges their output."""
    if not {"SLURM_STEP_ID", "SLURM_PROCID"} <= environ.keys():
        return False
    nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES", "")
    return nodes.isdecimal() and int(nodes) > 1
