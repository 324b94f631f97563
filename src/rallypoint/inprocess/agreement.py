"""`Round.agree`: all workers in a round continue from the state of the one that is furthest.

Laws:

1. torch is never imported. Without a process group, a function cannot agree with others. If there are other workers,
   this is an error, since their answers would differ.
2. State and step change together or not at all. A worker interrupted between the two would send its state with the
   wrong step.
3. State is sent through host memory, and each worker moves it to where its own state is. Otherwise a tensor would be
   created on the receiver's device that has the number of the sender's.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Mapping
from typing import Any, Protocol

from rallypoint.inprocess.aborting import c10d
from rallypoint.notices import uninterrupted

STEP = "step"
"""The key in `round.memory` of the last step that this worker finished."""


class Stateful(Protocol):
    """An object with a state, like torch's modules, optimizers and schedulers."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> object: ...


def agree(memory: dict[str, Any], state: Stateful | Mapping[str, Stateful] | None) -> int | None:
    """See `Round.agree`."""
    own, groups = memory.get(STEP), c10d()
    if groups is None or not groups.is_initialized():
        if os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1"):
            from rallypoint.base.errors import UserError

            raise UserError(
                f"round.agree() needs a process group, because there are {os.environ['WORLD_SIZE']} workers; call "
                "torch.distributed.init_process_group() first, in each round"
            )
        return own
    steps: list[int | None] = [None] * groups.get_world_size()
    groups.all_gather_object(steps, own)
    known = [step for step in steps if step is not None]
    if len(known) == len(steps) and min(known) == max(known):
        return own
    if not known or state is None:
        memory.pop(STEP, None)
        return None
    furthest = max(known)
    source = steps.index(furthest)
    parts = state if isinstance(state, Mapping) else {"": state}
    mine = {name: on_host(part.state_dict()) for name, part in parts.items()} if groups.get_rank() == source else None
    sent = [mine]
    groups.broadcast_object_list(sent, source)
    if own != furthest:
        assert sent[0] is not None
        with uninterrupted():
            for name, part in parts.items():
                part.load_state_dict(sent[0][name])
            memory[STEP] = furthest
    return furthest


def on_host(value: Any) -> Any:
    """The value with each tensor copied to host memory, in dicts, lists and tuples."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", ())
    if isinstance(value, tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        # A copy of the same class, with its attributes: a module's state has its parts' versions in `_metadata`.
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = on_host(item)
        return copied
    if isinstance(value, Mapping):
        return {key: on_host(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(on_host, value))
    return value
