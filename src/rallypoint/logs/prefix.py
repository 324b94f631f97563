"""What stands before each line of a worker that is shown on the console (contract section 6.5)."""

from __future__ import annotations

from collections.abc import Mapping

DEFAULT_TEMPLATE = "[${role_name}${local_rank}]:"
TEMPLATE_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
"""The environment variable that replaces the default template."""


def line_prefixes(template: str | None, role_name: str, ranks: Mapping[int, int]) -> dict[int, str]:
    """The prefix of each local rank.

    Args:
        template: text in which `${role_name}`, `${rank}` and `${local_rank}` are replaced; other names stay as they
            are written. None means the default, `[<role><local rank>]:`.
        role_name: the role of these workers.
        ranks: local rank to global rank.
    """
    from string import Template

    pattern = Template(DEFAULT_TEMPLATE if template is None else template)
    return {
        local_rank: pattern.safe_substitute(role_name=role_name, rank=rank, local_rank=local_rank)
        for local_rank, rank in ranks.items()
    }
