"""The digits of `--redirects` and `--tee`: which of a worker's two output streams are meant (contract section 6.4)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import IntFlag

from rallypoint.base.errors import UserError

_ONE = re.compile(r"[0-3]")
_PER_RANK = re.compile(r"(?:[0-9]:[0-3],)*[0-9]:[0-3]")


class Std(IntFlag):
    """Neither, one or both of standard output and standard error."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = OUT | ERR

    @classmethod
    def from_str(cls, vm: str) -> Std | dict[int, Std]:
        """Read one digit for all local ranks, or `local rank:digit` pairs. (The argument's name is torch's.)

        A rank that is named twice has its last value, as in torchrun.

        Raises:
            UserError: the text is neither.
        """
        if _ONE.fullmatch(vm):
            return cls(int(vm))
        if _PER_RANK.fullmatch(vm):
            pairs = (pair.split(":") for pair in vm.split(","))
            return {int(rank): cls(int(value)) for rank, value in pairs}
        raise UserError(
            f"{vm!r} names no output streams; write one digit for all workers ([0-3]: 0 none, 1 stdout, 2 stderr, "
            "3 both), or pairs of a local rank and a digit, separated by commas ([0-9]:[0-3], as in 0:1,1:3)"
        )


def to_map(val_or_map: Std | Mapping[int, Std], local_world_size: int) -> dict[int, Std]:
    """One value for each local rank: a single value for all, and `Std.NONE` for ranks that a mapping does not name."""
    if isinstance(val_or_map, Std):
        return dict.fromkeys(range(local_world_size), val_or_map)
    return {rank: val_or_map.get(rank, Std.NONE) for rank in range(local_world_size)}
