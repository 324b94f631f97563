"""Keeps a worker's process, and what it has in memory, when a round ends: only workers that died are started anew::

    from rallypoint import inprocess

    @inprocess.resumable
    def train(round):                     # called again, in the same process, for each round
        dist.init_process_group("gloo")   # as always, from the environment
        model = round.memory.get("model") or load_from_checkpoint()
        ...

    train()

When a round ends, because a worker died or a node joins, the function is interrupted in each worker that lives: what
torch waits for is aborted, and `RoundEnded` is raised in the main thread. When the function has come out, process
groups are destroyed; when the next round is there, its variables are set in `os.environ` and the function is called
again. `round.survived` says so, and `round.memory` is a dict that outlives rounds. Workers may have other ranks then.

A part that must be done as a whole or not at all, such as an optimizer's step, goes into `uninterrupted`. Let
`RoundEnded` pass: it is no `Exception`, so that `except Exception` does. Its clean-up (`finally`, `with`) is not cut.

Whoever does not come out in time (`--inprocess-timeout`) is killed and started anew. Outside of Rallypoint the function
is called once. Nothing here imports torch; `docs/how-to/in-process.md` says what survives, and what does not.
"""

from rallypoint.inprocess.aborting import on_round_end
from rallypoint.inprocess.interruption import RoundEnded
from rallypoint.inprocess.rounds import Round, resumable
from rallypoint.notices import uninterrupted

__all__ = ["Round", "RoundEnded", "on_round_end", "resumable", "uninterrupted"]
