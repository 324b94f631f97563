"""Preloaded workers: a zygote imports slow modules once, and restarted workers are forked from it.

    agent             the feature of an agent: when the imports begin, and what waits for them
    client            the zygotes of one agent, one after the other, and their copies that wait to become workers
    forkable          which workers can be forked: by their command and their variables (pure)
    hook/             the `sitecustomize` of an interpreter that becomes a zygote
    zygote            the zygote itself: import, fork; and how a copy becomes like a fresh interpreter
    imports           what it imports, what the imports read, and whether it may be forked afterwards

Laws:

1. A zygote is the worker's own command line, stopped in its `site` phase: argv, flags, `sys.path`, `__main__` and the
   way to the exit code are the interpreter's own, not an imitation.
2. A worker that could differ from a fresh one starts without preloading, and one log line gives the reason.
3. A zygote never runs the script: on any error it ends.
4. A worker's parent is the reaper, as without forking; the zygote's death ends no worker.
"""
