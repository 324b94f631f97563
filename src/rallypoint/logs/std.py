"""Which of a worker's two output streams is meant: the digits of `--redirects` and `--tee` (contract section 6.4)."""

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
        """What the user wrote: one digit for all local ranks, or `local rank:digit` pairs.

        A rank that is named twice keeps its last value, as in torchrun. (The argument's name is torch's.)

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


def to_map(value_or_map: Std | Mapping[int, Std], local_world_size: int) -> dict[int, Std]:
    """One value for each local rank from 0 to `local_world_size` - 1.

    A single value holds for all; a rank that a mapping does not name gets `Std.NONE`, and one that does not exist
    here is left out.
    """
    if isinstance(value_or_map, Std):
        return dict.fromkeys(range(local_world_size), value_or_map)
    return {rank: value_or_map.get(rank, Std.NONE) for rank in range(local_world_size)}
