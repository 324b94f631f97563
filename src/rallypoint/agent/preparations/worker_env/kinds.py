"""The table of kinds, and the parsing of their names. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rallypoint.agent.preparations.worker_env import jax, ompi, tensorflow
from rallypoint.agent.preparations.worker_env.place import Kind
from rallypoint.base.errors import UserError

TORCH = "torch"

KINDS: Mapping[str, Kind] = {jax.USE: jax.KIND, tensorflow.USE: tensorflow.KIND, "ompi": ompi.KIND}
"""The kinds besides torch's variables, which every worker gets."""


def checked(names: Sequence[str]) -> tuple[str, ...]:
    """The kinds with these names, without torch's, in the order of the table and each once.

    Raises:
        UserError: there is no such kind.
    """
    for name in names:
        if name not in KINDS and name != TORCH:
            raise UserError(f"{name!r} is none of {', '.join([TORCH, *KINDS])}")
    return tuple(name for name in KINDS if name in names)
