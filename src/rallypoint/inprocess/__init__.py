"""Keeps a worker's process and memory when a round ends: only workers that died are restarted::

    from rallypoint import inprocess

    def build():                          # once in each process, before its first round
        model = Model()
        return {"model": model, "optimizer": AdamW(model.parameters())}

    @inprocess.resumable(prepare=build)
    def train(round):                     # called again, in the same process, for each round
        dist.init_process_group("gloo")   # as always, from the environment
        if round.agree(round.prepared) is None:  # else all workers now have the state of the furthest one
            load_checkpoint(round.prepared)
        ...

    train()

When a round ends because a worker died or a node joins, the function is interrupted in each worker that is still
alive: torch's waiting calls are aborted, and `RoundEnded` is raised in the main thread. After the function returns or
raises, its process groups are destroyed. When the next round starts, its variables are set in `os.environ`, and the
function is called again. `round.survived` is then true, and `round.memory` is a dict that outlives rounds. To find out
how far the function came, read what it stored there, not `survived`. Ranks may have changed. `prepare` is optional.
With `rallyrun --standby=1`, an extra process has already run it, and replaces a worker that dies.

Put code that must run completely or not at all, such as an optimizer's step, into `uninterrupted`. Do not catch
`RoundEnded`: it is not an `Exception`, so `except Exception` lets it pass. The function is not interrupted while it
handles an exception, `RoundEnded` or another (in `except`, and in `finally` and `with` after an exception), nor in
`__del__` and finalizers.

A worker whose function does not end in time (`--inprocess-timeout`) is killed and restarted. Without Rallypoint, the
function is called once. The package does not import torch. `docs/how-to/in-process.md` lists what survives.
"""

from rallypoint.inprocess.aborting import on_round_end
from rallypoint.inprocess.interruption import RoundEnded
from rallypoint.inprocess.rounds import Round, resumable
from rallypoint.notices import uninterrupted

__all__ = ["Round", "RoundEnded", "on_round_end", "resumable", "uninterrupted"]
