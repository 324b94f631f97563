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
alive: torch's waiting calls are aborted, and `RoundEnded` is raised in the main thread. When the function has returned
or raised, its process groups are destroyed. When the next round begins, its variables are set in `os.environ`, and the
function is called again. Then `round.survived` is true, and `round.memory` is a dict that outlives rounds. How far the
function came is known from what it stored there, not from `survived`. Ranks may have changed. `prepare` is optional;
with `rallyrun --standby=1`, an additional process has already run it and replaces a worker that dies.

Put code that must run as a whole or not at all, such as an optimizer's step, into `uninterrupted`. Let `RoundEnded`
pass: it is not an `Exception`, so `except Exception` does not catch it. The function is not interrupted while it
handles an exception, `RoundEnded` or another (in `except`, and in `finally` and `with` after an exception), nor in
`__del__` and finalizers.

A worker whose function does not end in time (`--inprocess-timeout`) is killed and restarted. Outside of Rallypoint the
function is called once. The package imports no torch. `docs/how-to/in-process.md` says what survives and what does not.
"""

from rallypoint.inprocess.aborting import on_round_end
from rallypoint.inprocess.interruption import RoundEnded
from rallypoint.inprocess.rounds import Round, resumable
from rallypoint.notices import uninterrupted

__all__ = ["Round", "RoundEnded", "on_round_end", "resumable", "uninterrupted"]
