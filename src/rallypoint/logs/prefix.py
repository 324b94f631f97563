"""What stands before each line of a worker that is shown on the console (contract section 6.5)."""

from __future__ import annotations

import os
from collections.abc import Mapping

DEFAULT_TEMPLATE = "[${role_name}${local_rank}]:"
TEMPLATE_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
"""The environment variable that replaces the default template."""


def line_prefixes(template: str | None, role_name: str, ranks: Mapping[int, int], attempt: int = 0) -> dict[int, str]:
    """The prefix of each local rank.

    Args:
        template: text in which `${role_name}`, `${rank}` and `${local_rank}` are replaced, and beyond torch `${host}`
            (this node's own name) and `${attempt}`; other names stay as they are written. None and an empty
            text mean the default, `[<role><local rank>]:`.
        role_name: the role of these workers.
        ranks: local rank to global rank.
        attempt: how many restarts the job has used, as in the name of the log folder `attempt_<n>`.
    """
    from string import Template

    pattern = Template(template or DEFAULT_TEMPLATE)
    common = {"role_name": role_name, "host": os.uname().nodename, "attempt": attempt}
    return {
        local_rank: pattern.safe_substitute(common, rank=rank, local_rank=local_rank)
        for local_rank, rank in ranks.items()
    }
