"""Placeholders in worker arguments (contract section 1.7)."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.base.light_typing import Any


class macros:
    """Names that may stand in an argument and are replaced for each worker."""

    local_rank = "${local_rank}"

    @staticmethod
    def substitute(args: Sequence[Any], local_rank: str) -> list[Any]:
        """The arguments of one worker: in each that is a string, `${local_rank}` becomes `local_rank`.

        Other `${name}` and a lone `$` stay, `$$` becomes `$`.
        """
        return [_substituted(each, local_rank) if isinstance(each, str) else each for each in args]


def _substituted(text: str, local_rank: str) -> str:
    if "$" not in text:
        return text
    from string import Template

    return Template(text).safe_substitute(local_rank=local_rank)
