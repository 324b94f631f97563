"""Process groups: global ranks to ranks in a group, and back."""

from __future__ import annotations

from collections.abc import Iterable

from rallypoint.base.errors import UserError


class ProcessGroupRanks:
    """The ranks of one process group: its rank *i* is the *i*-th of `global_ranks`.

    Args:
        global_ranks: the members' global ranks, in the order of their ranks in the group.
        name: of the group, for messages.

    Raises:
        UserError: a rank is negative or occurs twice.
    """

    def __init__(self, global_ranks: Iterable[int], name: str = "default") -> None:
        self.name = name
        self.global_ranks = tuple(global_ranks)
        self._group_rank = {rank: place for place, rank in enumerate(self.global_ranks)}
        if len(self._group_rank) != len(self.global_ranks):
            twice = next(rank for rank in self.global_ranks if self.global_ranks.count(rank) > 1)
            raise UserError(f"process group {name!r} has the global rank {twice} twice; remove one")
        if any(rank < 0 for rank in self.global_ranks):
            raise UserError(f"process group {name!r} names the global rank {min(self.global_ranks)}; ranks start at 0")

    def __len__(self) -> int:
        return len(self.global_ranks)

    def __contains__(self, global_rank: object) -> bool:
        return global_rank in self._group_rank

    @property
    def size(self) -> int:
        """The number of ranks of the group."""
        return len(self.global_ranks)

    def group_rank(self, global_rank: int) -> int:
        """The rank in this group of the worker with `global_rank`; UserError if it is not a member."""
        try:
            return self._group_rank[global_rank]
        except KeyError:
            raise UserError(
                f"global rank {global_rank} is not in process group {self.name!r}, whose members are {self._members()}"
            ) from None

    def global_rank(self, group_rank: int) -> int:
        """The global rank of the worker with `group_rank` in this group; UserError if there is none."""
        if not 0 <= group_rank < self.size:
            raise UserError(f"process group {self.name!r} has ranks 0 to {self.size - 1}, not {group_rank}")
        return self.global_ranks[group_rank]

    def _members(self) -> str:
        shown = ", ".join(map(str, self.global_ranks[:16]))
        return shown + (f" and {self.size - 16} more" if self.size > 16 else "")
